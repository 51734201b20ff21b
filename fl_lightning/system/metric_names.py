"""Names of a user's own among those of metrics."""

import re

# MLflow takes these, and slashes, for which see below; a colon is refused on some systems.
STRANGE = re.compile(r"[^\w.\- ]+")
LONGEST = 200


def metric_name(given: str) -> str:
    """A user's name for a metric as every store takes it: what is refused somewhere becomes an underscore.

    >>> metric_name("val/loss (mean)"), metric_name("odd (1)"), metric_name("/acc@5/"), metric_name("val/my loss")
    ('val/loss_mean', 'odd_1', 'acc_5', 'val/my loss')
    """
    parts = [_cleaned(part) for part in given.split("/")]
    found = "/".join(part for part in parts if part not in ("", ".", ".."))[:LONGEST].rstrip("/ ")
    return found or "unnamed"


def _cleaned(part: str) -> str:
    if not STRANGE.search(part):
        return part.strip()
    return re.sub(r"[ _]*_[ _]*", "_", STRANGE.sub("_", part)).strip("_ ")
