"""Resident pages: what the GPU holds of prefixes whose KV lies in host memory, and the swap-in of what it lacks.

`reference` says what is computed; `Residents` is the planned form. Source: AsyncTLS, 4.2, where the unit of transfer is
called a block.
"""

from prefix_kernels.residents.runner import Residents
from prefix_kernels.residents.state import PAGE_TOKENS, Counter, Mode, ResidentGroup, ResidentShape
