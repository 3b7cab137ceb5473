"""Figure 17: the same steps in fewer GPU hours."""

from __future__ import annotations

from typing import Any, final

from themis.report.claims import Ordering
from themis.report.jobs import Job, Results
from themis.report.page import Page, Study, TableData
from themis.report.plots import label, legend, lines, tidy
from themis.report.studies.end_to_end import standard

_STEPS = (0, 2500, 5000, 7500, 10000)


@final
class GpuHours(Study):
    """Figure 17: losses by step are one process's whatever the policy (tests/fssdp), so hours differ by speed alone."""

    @property
    def key(self) -> str:
        """See Study."""
        return "fig17"

    def jobs(self) -> list[Job]:
        """EP and Themis, Phi-3.5-MoE on B."""
        return [standard("phi-3.5-moe", "b", policy) for policy in ("ep", "themis")]

    def page(self, results: Results) -> Page:
        """See Study."""
        hours = {job.policy: [step * results[job].iteration_s * 32 / 3600 for step in _STEPS] for job in self.jobs()}

        def draw(canvas: Any) -> None:
            axes = canvas.subplots()
            lines(axes, _STEPS, hours)
            tidy(axes, x="training steps", y="GPU hours", title="Phi-3.5-MoE, cluster B")
            legend(axes)

        rows = [[label(s), *(f"{value:.1f}" for value in values)] for s, values in hours.items()]
        fewer = Ordering(
            "hours", "Themis reaches a step, and so a loss, in fewer GPU hours", hours["themis"][-1] < hours["ep"][-1]
        )
        table = TableData("GPU hours by step", ["system", *map(str, _STEPS)], rows)
        note = (
            "The paper's curves of loss cannot be simulated. That losses by step do not depend on the policy is shown "
            "by training: the engine's tests hold every policy's losses to one process's."
        )
        return Page(self.key, "Figure 17. GPU hours", [table], (), [fewer], [note], draw)
