"""From options to pass pipelines, and their runs."""

from __future__ import annotations

from torch import fx

from perfopt.cost_model.decision import Decision
from perfopt.options import Options
from perfopt.passes.base import Level
from perfopt.records import Compilation


def check_pipeline(options: Options) -> None:
    """Raise `OptionError` unless the pipeline option is one."""


def run_passes(
    job: Compilation,
    level: Level,
    gm: fx.GraphModule,
    decisions: list[Decision] | None = None,
) -> fx.GraphModule:
    """Run the passes of one level; their decisions go to `decisions`, or to the compilation's."""
    return gm
