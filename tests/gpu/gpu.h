/* Tests of GPU memory run with a fake driver (tests/gpu/fake) on any machine, and with the real one
 * where DRAY_TEST_CUDA=real asks for it:
 *
 *     int main(void)
 *     {
 *         gpu_begin(2); // the number of GPUs; before the first call of the library
 *         ...
 *         return cmocka_run_group_tests(tests, NULL, NULL);
 *     }
 *
 * The real one skips the program (exit code 77) when there are fewer GPUs. A process that called
 * the driver cannot fork others that call it. Therefore tests that fork call it in children
 * alone. */
#pragma once

#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char gpu_state[64], gpu_cache[64];
static pid_t gpu_owner;

static inline bool gpu_is_real(void)
{
    const char *wish = getenv("DRAY_TEST_CUDA");
    return wish && strcmp(wish, "real") == 0;
}

/* Returns the number of GPUs of the real driver. A child asks for it, so that this process can
 * still fork others. */
static inline int gpu_real_count(void)
{
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        int (*init)(unsigned int) = NULL, (*count)(int *) = NULL, n = 0;
        const char *name = getenv("DRAY_CUDA_LIBRARY");
        void *driver = dlopen(name && *name ? name : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (driver) {
            *(void **)&init = dlsym(driver, "cuInit");
            *(void **)&count = dlsym(driver, "cuDeviceGetCount");
        }
        if (!init || !count || init(0) || count(&n))
            n = 0;
        _exit(n);
    }
    int status;
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status)
               ? WEXITSTATUS(status)
               : 0;
}

static inline void gpu_end(void)
{
    char command[128];
    if (gpu_owner != getpid())
        return;
    unlink(gpu_state);
    snprintf(command, sizeof command, "rm -rf '%s'", gpu_cache);
    if (system(command) != 0)
        fprintf(stderr, "%s is left\n", gpu_cache);
}

/* Has the library use the build's fakes of the driver, NVRTC and NCCL. With the real driver, skips
 * the program when it has fewer GPUs. */
static inline void gpu_begin(int devices)
{
    char number[16];
    if (gpu_is_real()) {
        int found = gpu_real_count();
        if (found >= devices)
            return;
        fprintf(stderr, "skipped: %d GPUs are needed, %d are there\n", devices, found);
        exit(77);
    }
    const char *fake = getenv("DRAY_FAKE_CUDA"), *tmp = getenv("TMPDIR");
    if (!fake || access(fake, R_OK)) {
        fprintf(stderr, "skipped: DRAY_FAKE_CUDA names no fake driver\n");
        exit(77);
    }
    snprintf(gpu_state, sizeof gpu_state, "/dev/shm/fake-cuda-XXXXXX");
    snprintf(gpu_cache, sizeof gpu_cache, "%.40s/dray-gpu-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    int fd = mkstemp(gpu_state);
    if (fd < 0 || !mkdtemp(gpu_cache))
        abort();
    close(fd);
    gpu_owner = getpid();
    atexit(gpu_end);
    snprintf(number, sizeof number, "%d", devices);
    setenv("DRAY_CUDA_LIBRARY", fake, 1);
    setenv("DRAY_NVRTC_LIBRARY", fake, 1);
    if (getenv("DRAY_FAKE_NCCL")) /* machines with GPUs have NCCL, too */
        setenv("DRAY_NCCL_LIBRARY", getenv("DRAY_FAKE_NCCL"), 0);
    setenv("FAKE_CUDA_STATE", gpu_state, 1);
    setenv("FAKE_CUDA_DEVICES", number, 1);
    /* The fake's compiled kernels are of no use to other programs. */
    setenv("XDG_CACHE_HOME", gpu_cache, 1);
    unsetenv("CUDA_VISIBLE_DEVICES");
}

/* Makes calls of the driver fail. "cuMemMap:3:2" makes the third call return code 2, and "3+" every
 * call from the third on. NULL ends that. Returns false with the real driver, where it does
 * nothing. */
static inline bool gpu_fail(const char *spec)
{
    void (*set)(const char *) = NULL;
    void *fake = gpu_is_real() ? NULL : dlopen(getenv("DRAY_FAKE_CUDA"), RTLD_NOW | RTLD_LOCAL);
    if (!fake)
        return false;
    *(void **)&set = dlsym(fake, "fake_cuda_fail");
    set(spec);
    dlclose(fake);
    return true;
}

/* Makes the `at`-th store of kernels go wrong, as tests/gpu/fake/kernels.c describes, with the fake
 * driver alone. Returns the number of stores since the last call. */
static inline uint64_t gpu_fault(int kind, uint64_t at)
{
    uint64_t (*set)(int, uint64_t) = NULL;
    void *fake = gpu_is_real() ? NULL : dlopen(getenv("DRAY_FAKE_CUDA"), RTLD_NOW | RTLD_LOCAL);
    if (!fake)
        return 0;
    *(void **)&set = dlsym(fake, "fake_cuda_fault");
    uint64_t count = set(kind, at);
    dlclose(fake);
    return count;
}
