"""What a study is known by."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

LATER = frozenset({"given"})


def short_hash(study: Any) -> str:
    """Of everything that a dataclass says; keys that studies did not always have count where they say something."""
    said = {key: value for key, value in asdict(study).items() if value or key not in LATER}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:8]
