// Tokens of gated linear attention on a CPU, and their gradients; ../matrix_memory.h has the recurrence.

#include "../matrix_memory.h"

EXPORT void gla_tokens(const Memory* m, int64_t first, int64_t last) { memory_tokens<false>(*m, first, last); }
EXPORT void gla_gradients(const Memory* m, int64_t first, int64_t last) { memory_gradients<false>(*m, first, last); }
