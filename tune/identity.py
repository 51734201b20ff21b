"""What a study is known by."""

import hashlib
import json
from dataclasses import asdict
from typing import Any


def short_hash(study: Any) -> str:
    """Of everything that a dataclass says."""
    return hashlib.sha256(json.dumps(asdict(study), sort_keys=True, default=str).encode()).hexdigest()[:8]
