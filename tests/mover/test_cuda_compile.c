/* Tests how the GPU's kernels become machine code. A real NVRTC, where there is one
 * ($DRAY_TEST_NVRTC, or where the library finds it), compiles the source for all architectures.
 * With the fake driver, compiled code is kept on disk, and damaged files there are replaced. */
#include "mover/cuda/cuda_internal.h"
#include "suite.h"

#include "gpu/gpu.h"

#include <glob.h>
#include <stdint.h>
#include <sys/stat.h>

enum { NOT_FOUND = 77 };

/* Compiles the kernels for one architecture, in a process of its own: NVRTC takes half a minute. */
static pid_t compile_in_child(int arch)
{
    fflush(NULL);
    pid_t child = fork();
    if (child != 0)
        return child;
    dray_error e = {0};
    void *cubin;
    size_t size = 0;
    int rc = dray__gpu_cubin(arch, &cubin, &size, &e);
    if (rc && strstr(e.message, "was not found"))
        _exit(NOT_FOUND);
    if (rc)
        fprintf(stderr, "sm_%d: %s\n", arch, e.message);
    _exit(rc || size <= 10000);
}

TEST(test_nvrtc_compiles_the_source)
{
    static const int archs[] = {80, 90, 100};
    const char *nvrtc = getenv("DRAY_TEST_NVRTC"), *before = getenv("DRAY_NVRTC_LIBRARY");
    char *kept = before ? strdup(before) : NULL;
    pid_t children[3];
    if (nvrtc)
        setenv("DRAY_NVRTC_LIBRARY", nvrtc, 1);
    else
        unsetenv("DRAY_NVRTC_LIBRARY");
    for (size_t i = 0; i < 3; i++)
        children[i] = compile_in_child(archs[i]);
    for (size_t i = 0; i < 3; i++) {
        int status;
        assert_int_equal(waitpid(children[i], &status, 0), children[i]);
        assert_true(WIFEXITED(status));
        if (WEXITSTATUS(status) == NOT_FOUND)
            printf("no NVRTC here: not compiled\n");
        else
            assert_int_equal(WEXITSTATUS(status), 0);
    }
    if (kept)
        setenv("DRAY_NVRTC_LIBRARY", kept, 1);
    free(kept);
}

/* Opens the kernels in a process of its own; NULL: with no NVRTC. */
static int open_in_child(const char *nvrtc)
{
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dray__cuda_device *device;
        dray__gpu *gpu;
        dray_error e = {0};
        setenv("DRAY_NVRTC_LIBRARY", nvrtc ? nvrtc : "", 1);
        int rc = dray__cuda_device_at(0, &device, &e);
        if (!rc)
            rc = dray__cuda_enter(device, &e);
        if (!rc)
            rc = dray__gpu_get(device, &gpu, &e);
        _exit(rc ? -rc : 0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return -WEXITSTATUS(status);
}

static void damage(const char *path, off_t at)
{
    uint8_t byte;
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    assert_int_equal(fseek(file, at, SEEK_SET), 0);
    assert_int_equal(fread(&byte, 1, 1, file), 1);
    byte ^= 1;
    assert_int_equal(fseek(file, at, SEEK_SET), 0);
    assert_int_equal(fwrite(&byte, 1, 1, file), 1);
    fclose(file);
}

TEST(test_what_was_compiled_is_kept)
{
    char pattern[256];
    glob_t found;
    struct stat status;
    if (gpu_is_real())
        skip(); /* compiles in earnest, for seconds each */
    const char *fake = getenv("DRAY_FAKE_CUDA");
    snprintf(pattern, sizeof pattern, "%s/dray/*", getenv("XDG_CACHE_HOME"));
    setenv("DRAY_CUDA_COMPILE", "1", 1);
    assert_int_equal(open_in_child(NULL), DRAY_EUNSUPPORTED);
    assert_int_equal(open_in_child(fake), DRAY_OK);
    assert_int_equal(open_in_child(NULL), DRAY_OK);
    assert_int_equal(glob(pattern, 0, NULL, &found), 0);
    assert_int_equal(found.gl_pathc, 1);
    assert_int_equal(stat(found.gl_pathv[0], &status), 0);
    for (off_t at = 0; at < status.st_size; at += status.st_size / 7) {
        damage(found.gl_pathv[0], at);
        assert_int_equal(open_in_child(NULL), DRAY_EUNSUPPORTED);
        damage(found.gl_pathv[0], at);
    }
    assert_int_equal(open_in_child(NULL), DRAY_OK);
    assert_int_equal(truncate(found.gl_pathv[0], status.st_size - 1), 0);
    assert_int_equal(open_in_child(NULL), DRAY_EUNSUPPORTED);
    assert_int_equal(open_in_child(fake), DRAY_OK); /* made again, in its place */
    assert_int_equal(open_in_child(NULL), DRAY_OK);
    globfree(&found);
}

int main(void)
{
    gpu_begin(1);
    return suite_run(NULL, NULL);
}
