/* mover: the suite of test_mover.c for all pairs with GPUs' memory or pinned memory, and sums of
 * such regions. */
#define ON_GPU
#include "mover/test_mover.c"
