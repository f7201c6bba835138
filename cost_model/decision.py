"""`Decision`: one choice of one pass, with the costs that it was made by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from perfopt.cost_model.cost import Cost


class Verdict(Enum):
    """How a pass decided at one place."""

    APPLIED = "applied"
    REJECTED = "rejected"
    NOTE = "note"
    FAILED = "failed"


@dataclass(frozen=True)
class Decision:
    """One choice: what was done or refused, where, why, and at what predicted price.

    `reason` is a template filled from `values`, so that text and JSON say the same thing.
    `before` and `after` price the place without and with the change; a refused change has its
    price in `alternative_cost`. `source` is the user's line as `file.py:12`, or "".
    """

    pass_name: str
    verdict: Verdict
    nodes: tuple[str, ...]
    reason: str
    values: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    source: str = ""
    before: Cost | None = None
    after: Cost | None = None
    alternative: str = ""
    alternative_cost: Cost | None = None

    @property
    def seconds_saved(self) -> float:
        """Predicted seconds saved by an applied decision; 0.0 for every other verdict."""
        if self.verdict is not Verdict.APPLIED or self.before is None or self.after is None:
            return 0.0
        return self.before.seconds - self.after.seconds

    def text(self) -> str:
        """The reason as a sentence."""
        return self.reason.format(**self.values)
