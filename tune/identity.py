"""What a study is known by."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

LATER = frozenset({"given", "confirming", "among"})


def short_hash(study: Any) -> str:
    """Of everything that a dataclass says; keys that studies did not always have count where they say something."""
    said = asdict(study, dict_factory=lambda items: {key: value for key, value in items if value or key not in LATER})
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:8]
