"""A trace of some steps, in the directory where TensorBoard's profile plugin and tools.profile_summary look for it."""

from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from minitf.runtime.processes import is_first


class Profile:
    """Traces the steps that `profile` names into WORKDIR/plugins/profile/TIME, in the first process: all do the same, and
    TensorBoard would show each by itself. A trace that cannot be made is told, and the run goes on. As a context it ends, on
    leaving, a trace that is under way."""

    def __init__(self, workdir: epath.Path, profile: tuple[int, int] | None, done: int, say: Callable[[str], None]):
        """`done`: the last step of an earlier process."""
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
        """Whether that is behind this step, whose work must be done by then; the same in every process."""
        return step in (self._before, self._last)

    def begin(self, step: int) -> None:
        """Where the trace begins behind this step."""
        if step != self._before or not is_first():
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # an event for each call of Python would slow the steps and fill the trace
        try:
            jax.profiler.start_trace(str(self._workdir), profiler_options=options)
            self._tracing = True
        except RuntimeError as e:  # someone else traces this process
            self._say(f"warning: no profile: {e}")

    def end(self, step: int) -> None:
        """Where the trace ends behind this step."""
        if step == self._last:
            self._end()

    def _end(self) -> None:
        if not self._tracing:
            return
        self._tracing = False
        try:
            jax.profiler.stop_trace()
        except Exception as e:  # a full disk: it raises nothing narrower
            self._say(f"warning: the profile could not be written: {e}")
            return
        self._say(
            f"profile of steps {self._before + 1} to {self._last}: python -m tools.profile_summary {self._workdir}"
        )
