/* Compiled for any machine. */
#define KERNELS dray__kernels_portable
#define KERNELS_NAME "portable"
#include "mover/kernels/kernels_body.h"
