/* The kernels' machine code. nvcc builds it in where the library is built; else NVRTC (part of
 * every PyTorch) compiles it at first use, and it is cached on disk for later processes. */
#include "base/error.h"
#include "base/hash.h"
#include "base/io.h"
#include "base/library.h"
#include "memory/gpu_library.h"
#include "mover/cuda/cuda_embedded.h"
#include "mover/cuda/cuda_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- NVRTC (docs.nvidia.com/cuda/nvrtc) -------------------------------------------------------
 */

typedef struct nvrtc_program *nvrtc_program;

/* XX(result, name, parameters) */
#define NVRTC_FUNCTIONS(XX)                                                                        \
    XX(int, nvrtcVersion, (int *major, int *minor))                                                \
    XX(const char *, nvrtcGetErrorString, (int result))                                            \
    XX(int, nvrtcCreateProgram,                                                                    \
       (nvrtc_program * program, const char *source, const char *name, int headers,                \
        const char *const *header_sources, const char *const *header_names))                       \
    XX(int, nvrtcDestroyProgram, (nvrtc_program * program))                                        \
    XX(int, nvrtcCompileProgram, (nvrtc_program program, int count, const char *const *options))   \
    XX(int, nvrtcGetCUBINSize, (nvrtc_program program, size_t * bytes))                            \
    XX(int, nvrtcGetCUBIN, (nvrtc_program program, char *out))                                     \
    XX(int, nvrtcGetProgramLogSize, (nvrtc_program program, size_t * bytes))                       \
    XX(int, nvrtcGetProgramLog, (nvrtc_program program, char *out))

typedef struct nvrtc {
#define XX(result, name, parameters) result(*name) parameters;
    NVRTC_FUNCTIONS(XX)
#undef XX
} nvrtc;

static const dray__symbol symbols[] = {
#define XX(result, name, parameters) {#name, offsetof(nvrtc, name), false},
    NVRTC_FUNCTIONS(XX)
#undef XX
};

static int nvrtc_open(nvrtc *out, dray_error *error)
{
    void *library = dray__gpu_library_open(DRAY__GPU_NVRTC);
    if (!library)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "the GPU's kernels are not compiled, and NVRTC, which would do it, was "
                          "not found: set DRAY_NVRTC_LIBRARY to libnvrtc.so.13 (or .12)");
    const char *absent = /* the library stays open until the process ends */
        dray__symbols_load(library, symbols, sizeof symbols / sizeof *symbols, out);
    return absent ? dray__fail(error, DRAY_EUNSUPPORTED, "NVRTC has no %s", absent) : DRAY_OK;
}

static int fail_compile(const nvrtc *n, nvrtc_program program, int result, dray_error *error)
{
    char *log = NULL;
    size_t bytes = 0;
    if (n->nvrtcGetProgramLogSize(program, &bytes) == 0 && bytes > 1 && (log = malloc(bytes)) &&
        n->nvrtcGetProgramLog(program, log) != 0)
        log[0] = '\0';
    int rc = dray__fail(error, DRAY_EUNSUPPORTED, "compiling the GPU's kernels: %s %.200s",
                        n->nvrtcGetErrorString(result), log ? log : "");
    free(log);
    return rc;
}

int dray__gpu_cubin(int arch, void **out, size_t *size, dray_error *error)
{
#define XX(variable, name) name,
    static const char *const names[] = {DRAY__GPU_HEADERS(XX)};
#undef XX
#define XX(variable, name) (const char *)variable,
    const char *headers[] = {DRAY__GPU_HEADERS(XX)};
#undef XX
    char target[32];
    const char *options[] = {target, "--std=c++17", "-fmad=false"};
    nvrtc n = {0};
    nvrtc_program program;
    int rc = nvrtc_open(&n, error);
    if (rc)
        return rc;
    snprintf(target, sizeof target, "-arch=sm_%d", arch);
    int result = n.nvrtcCreateProgram(&program, (const char *)dray__gpu_source, "cuda_kernels.cu",
                                      sizeof headers / sizeof *headers, headers, names);
    if (result)
        return dray__fail(error, DRAY_EUNSUPPORTED, "NVRTC: %s", n.nvrtcGetErrorString(result));
    result = n.nvrtcCompileProgram(program, 3, options);
    if (!result)
        result = n.nvrtcGetCUBINSize(program, size);
    if (!result && !(*out = malloc(*size)))
        rc = dray__nomem(error);
    else if (!result)
        result = n.nvrtcGetCUBIN(program, *out);
    if (result) {
        rc = fail_compile(&n, program, result, error);
        free(*out);
        *out = NULL;
    }
    n.nvrtcDestroyProgram(&program);
    return rc;
}

/* ---- the cache on disk---------------------------------------------------------------------------
 */

/* The header of a cached cubin: `key` identifies the source, `hash` shows that the file is whole.
 */
typedef struct kept_cubin {
    uint64_t key, bytes, hash;
} kept_cubin;

static uint64_t key_of(const dray__cuda *cuda, int arch)
{
#define XX(variable, name) dray__hash(variable, variable##_size),
    uint64_t parts[] = {dray__hash(dray__gpu_source, dray__gpu_source_size),
                        DRAY__GPU_HEADERS(XX)(uint64_t) cuda->version, (uint64_t)arch};
#undef XX
    return dray__hash(parts, sizeof parts);
}

/* Gives the path of a cached cubin and makes its folder. Returns false when there is no folder for
 * caches. */
static bool cache_path(uint64_t key, int arch, char *out, size_t size)
{
    char folder[PATH_MAX];
    if (!dray__cache_folder(folder, sizeof folder))
        return false;
    int n = snprintf(out, size, "%s/kernels-%016" PRIx64 "-sm%d.cubin", folder, key, arch);
    return n > 0 && (size_t)n < size;
}

static bool cache_read(const char *path, uint64_t key, void **out, size_t *size)
{
    enum { MOST = 64 << 20 };
    struct stat status;
    kept_cubin head;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool fine = fd >= 0 && fstat(fd, &status) == 0 && status.st_uid == geteuid() &&
                dray__read_at(fd, &head, sizeof head, 0) == 0 && head.key == key &&
                head.bytes <= MOST && (uint64_t)status.st_size == sizeof head + head.bytes &&
                (*out = malloc(head.bytes + 1)) != NULL;
    if (fine && (dray__read_at(fd, *out, head.bytes, sizeof head) != 0 ||
                 dray__hash(*out, head.bytes) != head.hash)) {
        free(*out);
        fine = false;
    }
    if (fine)
        *size = head.bytes;
    if (fd >= 0)
        close(fd);
    return fine;
}

/* Ignores errors: a cubin that is not cached is compiled again. */
static void cache_write(const char *path, uint64_t key, const void *cubin, size_t size)
{
    kept_cubin head = {key, size, dray__hash(cubin, size)};
    char name[PATH_MAX];
    int n = snprintf(name, sizeof name, "%s.XXXXXX", path);
    int fd = n > 0 && (size_t)n < sizeof name ? mkostemp(name, O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    bool fine =
        dray__write_all(fd, &head, sizeof head) == 0 && dray__write_all(fd, cubin, size) == 0;
    if (close(fd) || !fine || rename(name, path))
        unlink(name);
}

/* ---- the module -------------------------------------------------------------------------------
 */

int dray__gpu_module(const dray__cuda *cuda, const dray__cuda_device *device, CUmodule *out,
                     dray_error *error)
{
    char path[PATH_MAX];
    void *cubin = NULL;
    size_t size = 0;
    const char *anew = getenv("DRAY_CUDA_COMPILE"); /* ignores the built-in code */
    bool built = dray__gpu_built_size && !(anew && *anew);
    if (built && cuda->cuModuleLoadData(out, dray__gpu_built) == CUDA_SUCCESS)
        return DRAY_OK;
    uint64_t key = key_of(cuda, device->arch);
    bool keep = cache_path(key, device->arch, path, sizeof path);
    if (keep && cache_read(path, key, &cubin, &size)) {
        CUresult result = cuda->cuModuleLoadData(out, cubin);
        free(cubin);
        if (result == CUDA_SUCCESS)
            return DRAY_OK;
        cubin = NULL;
    }
    int rc = dray__gpu_cubin(device->arch, &cubin, &size, error);
    if (rc)
        return rc;
    CUresult result = cuda->cuModuleLoadData(out, cubin);
    if (result)
        rc = dray__fail_cuda(error, result, "loading the GPU's kernels");
    else if (keep)
        cache_write(path, key, cubin, size);
    free(cubin);
    return rc;
}
