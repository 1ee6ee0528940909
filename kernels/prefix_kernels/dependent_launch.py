"""The start of every kernel that may be launched while the one before it still runs.

Hopper's programmatic dependent launch takes the start of a kernel off the clock: its programs are on the GPU when the
kernel before them ends. Whatever that one wrote may only be read after `wait_for_the_kernel_before`, so it stands
before the first read or write of memory in each kernel (a test looks for it in what is compiled); in one that is
started by `launching.launch_behind`, before the first one of what the launch before it writes. `launching` sets it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_the_kernel_before(OVERLAPPED: tl.constexpr):  # noqa: N803
    """Wait until it has ended and all that it wrote can be read, then let the next kernel's programs come."""
    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def let_the_next_kernel_come():
    """Its programs may be put on the GPU from now on, where there is room. They wait for this kernel's end."""
    gdc_launch_dependents()


@triton.jit
def nothing(OVERLAPPED: tl.constexpr):  # noqa: N803
    """For `launching`, which tries how a kernel may be launched."""
    wait_for_the_kernel_before(OVERLAPPED)
