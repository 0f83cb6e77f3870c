/* Libraries of the GPU world beside the driver, which are opened at run time and wherever they are:
 * where the variable says, where the system finds them, where the CUDA toolkit puts them, or where
 * Python's packages keep them (PyTorch brings both). */
#ifndef DRAY_MEMORY_GPU_LIBRARY_H
#define DRAY_MEMORY_GPU_LIBRARY_H

#include <stddef.h>

typedef enum dray__gpu_library {
    DRAY__GPU_NVRTC, /* $DRAY_NVRTC_LIBRARY */
    DRAY__GPU_NCCL,  /* $DRAY_NCCL_LIBRARY */
} dray__gpu_library;

/* What dlopen gives, for the life of the process. NULL: it is not there, or the variable is empty:
 * it is not wanted. */
void *dray__gpu_library_open(dray__gpu_library which);
const char *dray__gpu_library_variable(dray__gpu_library which);

#endif
