/* Compiled for any machine. */
#define KERNELS dray__arithmetic_portable
#define KERNELS_NAME "portable"
#include "engine/kernels/body.h"
