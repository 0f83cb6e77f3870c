/* Tests of GPU memory run with a fake driver (tests/gpu/fake) on any machine, and with the real one
 * where DRAY_TEST_CUDA=real asks for it:
 *
 *     int main(void)
 *     {
 *         gpu_begin(2);              // before the first call of the library: how many GPUs it
 * needs
 *         ...
 *         return cmocka_run_group_tests(tests, NULL, NULL);
 *     }
 *
 * Without a GPU, or too few of them, the real one is a skip (exit code 77). A process that called
 * the driver cannot fork others that call it: tests that fork call it in children alone. */
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

/* GPUs of the real driver, asked for in a child: this process may fork more. */
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

/* Takes the library's driver, its NVRTC and NCCL, from the build's fakes; skips where a real one is
 * wanted that has fewer GPUs. */
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
    setenv("XDG_CACHE_HOME", gpu_cache,
           1); /* compiled kernels: the fake's are of no use to others */
    unsetenv("CUDA_VISIBLE_DEVICES");
}

/* Lets calls of the driver fail: "cuMemMap:3:2" is the third with code 2, "3+" from the third on;
 * NULL: no more. Under the fake alone; false: this is a real one. */
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

/* Lets the `at`-th store of kernels go wrong (tests/gpu/fake/kernels.c says how), under the fake
 * alone. Returns how many there were since the last call. */
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
