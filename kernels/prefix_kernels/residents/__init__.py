"""Resident tokens: what the GPU holds of prefixes whose KV lies in host memory, and the swap-in of what it lacks.

`reference` says what is computed; `Residents` is the planned form. Source: AsyncTLS, 4.2, where the unit of transfer is
a block of tokens; a token is read at the link's rate, too.
"""

from prefix_kernels.residents.gather import gather_listed
from prefix_kernels.residents.runner import Residents
from prefix_kernels.residents.state import (
    PAGE_TOKENS,
    Counter,
    ResidentGroup,
    ResidentShape,
    from_pages,
    to_pages,
)
