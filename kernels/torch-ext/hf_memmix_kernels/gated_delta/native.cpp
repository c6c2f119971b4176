// Tokens of the gated delta rule on a CPU, and their gradients; ../matrix_memory.h has the recurrence.

#include "../matrix_memory.h"

EXPORT void gated_delta_tokens(const Memory* m, int64_t first, int64_t last) { memory_tokens<true>(*m, first, last); }
EXPORT void gated_delta_gradients(const Memory* m, int64_t first, int64_t last) { memory_gradients<true>(*m, first, last); }
