/* Tests that the library finds NCCL where `dray doctor` finds it, also in Python's packages. Uses
 * the fake NCCL, where the system has none of its own. */
#include "mover/cuda/nccl.h"
#include "suite.h"

#include <dray/gpu.h>

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SKIPPED = 77 };

static const char *const parts[] = {"",        "/lib",  "/python3.11", "/site-packages",
                                    "/nvidia", "/nccl", "/lib"};
enum { PARTS = sizeof parts / sizeof *parts };

TEST(found_in_packages)
{
    const char *tmp = getenv("TMPDIR");
    char path[256], detail[256] = "";
    int version = 0;
    dray_error e = {0};
    snprintf(path, sizeof path, "%s/dray-nccl-XXXXXX", tmp && strlen(tmp) < 60 ? tmp : "/tmp");
    assert_non_null(mkdtemp(path));
    setenv("VIRTUAL_ENV", path, 1);
    for (int i = 1; i < PARTS; i++) {
        strcat(path, parts[i]);
        assert_int_equal(mkdir(path, 0700), 0);
    }
    strcat(path, "/libnccl.so.2");
    assert_int_equal(symlink(getenv("DRAY_FAKE_NCCL"), path), 0);
    int doctor = dray_gpu_library("nccl", detail, sizeof detail, &e);
    int mover = dray__nccl_find(&version, &e);
    unlink(path);
    for (int i = PARTS; i-- > 0;) {
        *strrchr(path, '/') = 0;
        rmdir(path);
    }
    assert_int_equal(doctor, DRAY_OK);
    if (mover)
        fail_msg("%s, but: %s", detail, e.message);
    assert_true(version >= 21800);
}

int main(void)
{
    unsetenv("DRAY_NCCL_LIBRARY");
    void *system = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (system || !getenv("DRAY_FAKE_NCCL")) {
        printf("skipped: NCCL of the system, or no fake one\n");
        return SKIPPED;
    }
    return suite_run(NULL, NULL);
}
