/* Compiled for machines with AVX-512 (CMakeLists.txt gives the flags). */
#define KERNELS dray__arithmetic_avx512
#define KERNELS_NAME "avx512"
#include "engine/kernels/body.h"
