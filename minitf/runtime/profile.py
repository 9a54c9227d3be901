"""A profiler trace of some steps, in the directory that TensorBoard's profile plugin and tools.profile_summary read."""

from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from minitf.runtime.processes import is_first


class Profile:
    """Traces the steps given by `profile` into WORKDIR/plugins/profile/TIME, in process 0 only: all processes do the same, and
    TensorBoard would show each separately. If tracing fails, reports it, and the run continues. As a context manager it ends a
    running trace on exit."""

    def __init__(self, workdir: epath.Path, profile: tuple[int, int] | None, done: int, say: Callable[[str], None]):
        """done: the step from which this process resumes."""
        self._workdir, self._say, self._tracing = workdir, say, False
        if profile is not None and profile[0] <= done:
            say(f"profile={','.join(map(str, profile))}: step {profile[0]} is already done; nothing is traced")
            profile = None
        self._before, self._last = (None, None) if profile is None else (profile[0] - 1, sum(profile) - 1)

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: Any) -> None:
        self._end()

    def begins_or_ends(self, step: int) -> bool:
        """Whether the trace begins or ends after this step, which must be computed by then; the same in every process."""
        return step in (self._before, self._last)

    def begin(self, step: int) -> None:
        """Starts the trace if it begins after this step."""
        if step != self._before or not is_first():
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # an event for each Python call would slow the steps and fill the trace
        try:
            jax.profiler.start_trace(str(self._workdir), profiler_options=options)
            self._tracing = True
        except RuntimeError as e:  # another profiler traces this process
            self._say(f"warning: no profile: {e}")

    def end(self, step: int) -> None:
        """Ends the trace if it ends after this step."""
        if step == self._last:
            self._end()

    def _end(self) -> None:
        if not self._tracing:
            return
        self._tracing = False
        try:
            jax.profiler.stop_trace()
        except Exception as e:  # such as a full disk; JAX raises no narrower type
            self._say(f"warning: the profile could not be written: {e}")
            return
        self._say(
            f"profile of steps {self._before + 1} to {self._last}: python -m tools.profile_summary {self._workdir}"
        )
