/* Keeps a stream busy for a while. On a real GPU a kernel spins. With the fake driver, which has no
 * kernels but the library's, a host function sleeps. */
#pragma once

#include "gpu/weights.h"

#include <dlfcn.h>

static inline void spin_here(void *milliseconds)
{
    usleep((useconds_t)(uintptr_t)milliseconds * 1000);
}

static const char spin_source[] =
    "extern \"C\" __global__ void spin(unsigned long long ns) { unsigned long long a, b;\n"
    "  asm volatile(\"mov.u64 %0, %globaltimer;\" : \"=l\"(a));\n"
    "  do asm volatile(\"mov.u64 %0, %globaltimer;\" : \"=l\"(b)); while (b - a < ns); }\n";

/* Returns the kernel. The device's context must be current. */
static inline CUfunction spin_kernel(const dray__cuda *cuda, int arch)
{
    static CUfunction kernel;
    int (*create)(void **, const char *, const char *, int, const void *, const void *);
    int (*compile)(void *, int, const char *const *), (*size_of)(void *, size_t *);
    int (*get)(void *, char *);
    const char *own = getenv("DRAY_NVRTC_LIBRARY");
    void *library = dlopen(own ? own : "libnvrtc.so.13", RTLD_NOW | RTLD_LOCAL), *program;
    char option[40];
    const char *options[] = {option};
    size_t size = 0;
    CUmodule module;
    if (kernel)
        return kernel;
    library = library ? library : dlopen("libnvrtc.so.12", RTLD_NOW | RTLD_LOCAL);
    CHECK(library);
    *(void **)&create = dlsym(library, "nvrtcCreateProgram");
    *(void **)&compile = dlsym(library, "nvrtcCompileProgram");
    *(void **)&size_of = dlsym(library, "nvrtcGetCUBINSize");
    *(void **)&get = dlsym(library, "nvrtcGetCUBIN");
    snprintf(option, sizeof option, "--gpu-architecture=sm_%d", arch);
    CHECK(create(&program, spin_source, "spin.cu", 0, NULL, NULL) == 0);
    CHECK(compile(program, 1, options) == 0 && size_of(program, &size) == 0 && size);
    char *image = malloc(size);
    CHECK(image && get(program, image) == 0);
    CHECK(cuda->cuModuleLoadData(&module, image) == CUDA_SUCCESS);
    CHECK(cuda->cuModuleGetFunction(&kernel, module, "spin") == CUDA_SUCCESS);
    free(image);
    return kernel;
}

/* Delays the later work of the stream by so many milliseconds. */
static inline void spin(const dray__cuda *cuda, dray__cuda_device *device, CUstream stream,
                        uint64_t milliseconds)
{
    MUST(dray__cuda_enter(device, error));
    if (gpu_is_real()) {
        unsigned long long ns = milliseconds * 1000000;
        void *parameters[] = {&ns};
        CHECK(cuda->cuLaunchKernel(spin_kernel(cuda, device->arch), 264, 1, 1, 256, 1, 1, 0, stream,
                                   parameters, NULL) == CUDA_SUCCESS);
    } else {
        CHECK(cuda->cuLaunchHostFunc(stream, spin_here, (void *)(uintptr_t)milliseconds) ==
              CUDA_SUCCESS);
    }
    dray__cuda_leave();
}
