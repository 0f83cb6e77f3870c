/* NVRTC and NCCL, which are opened at run time. They are looked for at the path in an environment
 * variable, in the system's folders, in the CUDA toolkit's, and in Python's packages, where PyTorch
 * installs them. */
#pragma once

typedef enum dray__gpu_library {
    DRAY__GPU_NVRTC, /* $DRAY_NVRTC_LIBRARY */
    DRAY__GPU_NCCL,  /* $DRAY_NCCL_LIBRARY */
} dray__gpu_library;

/* Returns dlopen's result, for the life of the process. NULL when the library was not found, or the
 * variable is empty, which turns it off. */
void *dray__gpu_library_open(dray__gpu_library which);
const char *dray__gpu_library_variable(dray__gpu_library which);
