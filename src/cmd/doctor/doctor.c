/* dray doctor: looks for everything that dray can use on this machine, and reports the features
 * that do not work without it. It fails only when a part is missing that dray cannot run
 * without. */
#include "cmd/doctor/doctor.h"
#include "cmd/cmd.h"
#include "run/job/model.h"
#include "run/supervisor/sandbox.h"

#include <dray/checkpoint.h>
#include <dray/gpu.h>
#include <dray/queue.h>
#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>
#include <xxhash.h>
#include <yaml.h>

typedef struct finding {
    bool found;
    char detail[256]; /* a version or a size; when not found, why */
    double value;     /* of a measurement, in `unit` of its check; else 0 */
} finding;

#define found(f, ...) say(f, true, __VA_ARGS__)
#define missing(f, ...) say(f, false, __VA_ARGS__)
static __attribute__((format(printf, 3, 4))) void say(finding *f, bool found, const char *format,
                                                      ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(f->detail, sizeof(f->detail), format, arguments);
    va_end(arguments);
    f->found = found;
}

/* ---- the machine ----------------------------------------------------------------------------- */

static void look_kernel(finding *f)
{
    struct utsname name;
    if (uname(&name) == 0)
        found(f, "%s %s %s", name.sysname, name.release, name.machine);
}

static void look_cores(finding *f)
{
    cpu_set_t set;
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    int usable = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : (int)online;
    f->value = usable;
    found(f, "%d usable of %ld", usable, online);
}

static void look_memory(finding *f)
{
    double page = (double)sysconf(_SC_PAGESIZE);
    double total = page * (double)sysconf(_SC_PHYS_PAGES);
    double free_now = page * (double)sysconf(_SC_AVPHYS_PAGES);
    f->value = total;
    found(f, "%s, %s free", dray__say_bytes(total).s, dray__say_bytes(free_now).s);
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Measures the rate at which one core copies, which limits every update between processes of this
 * machine. Both buffers are touched first, because a new page costs more than its copy. */
static void look_copy_rate(finding *f)
{
    enum { BYTES = 64 << 20, REPEATS = 5 };
    char *from = malloc(BYTES), *to = malloc(BYTES);
    double seconds[REPEATS];
    if (from && to) {
        memset(from, 1, BYTES);
        memset(to, 2, BYTES);
        for (int i = 0; i < REPEATS; i++) {
            int64_t begin = cmd_now();
            memcpy(to, from, BYTES);
            /* Keeps the compiler from removing the copy. */
            __asm__ volatile("" : : "r"(to) : "memory");
            seconds[i] = (double)(cmd_now() - begin) * 1e-9;
        }
        qsort(seconds, REPEATS, sizeof(seconds[0]), compare_doubles);
        f->value = BYTES / seconds[REPEATS / 2];
        found(f, "%s/s (median of %d copies of 64 MiB, one core)", dray__say_bytes(f->value).s,
              REPEATS);
    } else {
        missing(f, "%s", strerror(errno));
    }
    free(from);
    free(to);
}

/* ---- the kernel's parts ---------------------------------------------------------------------- */

static void look_memfd(finding *f)
{
    int fd = memfd_create("dray-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        missing(f, "memfd_create: %s", strerror(errno));
    else if (ftruncate(fd, 4096) < 0 ||
             fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE) < 0)
        missing(f, "seals: %s", strerror(errno));
    else
        found(f, "with seals");
    if (fd >= 0)
        close(fd);
}

static void look_pidfd(finding *f)
{
    int fd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (fd < 0) {
        missing(f, "pidfd_open: %s", strerror(errno));
        return;
    }
    found(f, "works");
    close(fd);
}

static void look_landlock(finding *f)
{
    int version = dray__sandbox_version();
    if (version)
        found(f, "version %d", version);
    else
        missing(f, "no Landlock in this kernel (Linux 5.13), or not for us");
}

static void look_huge_pages(finding *f)
{
    const size_t bytes = (size_t)2 << 20;
    int fd = memfd_create("dray-doctor", MFD_CLOEXEC | MFD_HUGETLB);
    void *at = MAP_FAILED;
    if (fd >= 0 && ftruncate(fd, (off_t)bytes) == 0)
        at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        missing(f, "memfd with MFD_HUGETLB: %s", strerror(errno));
    else
        found(f, "memfd with MFD_HUGETLB works");
    if (at != MAP_FAILED)
        munmap(at, bytes);
    if (fd >= 0)
        close(fd);
}

static void look_shm(finding *f)
{
    struct statvfs vfs;
    if (statvfs("/dev/shm", &vfs) < 0) {
        missing(f, "/dev/shm: %s", strerror(errno));
        return;
    }
    double block = (double)vfs.f_frsize;
    f->value = block * (double)vfs.f_blocks;
    found(f, "%s, %s free", dray__say_bytes(f->value).s,
          dray__say_bytes(block * (double)vfs.f_bavail).s);
}

static void look_io_uring(finding *f)
{
    unsigned char parameters[120] = {0}; /* struct io_uring_params, all zero */
    long fd = syscall(SYS_io_uring_setup, 1, parameters);
    if (fd < 0) {
        missing(f, "io_uring_setup: %s", strerror(errno));
        return;
    }
    found(f, "works");
    close((int)fd);
}

/* ---- libraries ------------------------------------------------------------------------------- */

static void look_redis(finding *f)
{
    if (dray_queue_backend_built(DRAY_BACKEND_REDIS))
        found(f, "built in");
    else
        missing(f, "hiredis was not there when dray was built");
}

static void look_libevent(finding *f)
{
    found(f, "%s", event_get_version());
}

static void look_jansson(finding *f)
{
    found(f, "%s", jansson_version_str());
}

static void look_xxhash(finding *f)
{
    unsigned v = XXH_versionNumber();
    found(f, "%u.%u.%u", v / 10000, v / 100 % 100, v % 100);
}

static void look_yaml(finding *f)
{
    found(f, "%s", yaml_get_version_string());
}

static void look_openblas(finding *f)
{
    const char *config = dray__job_blas();
    if (config)
        found(f, "%s", config);
    else
        missing(f, "libopenblas.so.0 is not there");
}

static void look_gpu_library(finding *f, const char *which)
{
    char detail[sizeof f->detail];
    dray_error error;
    if (dray_gpu_library(which, detail, sizeof detail, &error))
        missing(f, "%s", error.message);
    else
        found(f, "%s", detail);
}

static void look_cuda(finding *f)
{
    int32_t count = 0;
    look_gpu_library(f, "cuda");
    if (f->found && dray_gpu_count(&count, NULL, NULL) == DRAY_OK) {
        size_t used = strlen(f->detail);
        snprintf(f->detail + used, sizeof(f->detail) - used, ", %d GPU%s", (int)count,
                 count == 1 ? "" : "s");
    }
    f->value = count;
}

static void look_nvrtc(finding *f)
{
    look_gpu_library(f, "nvrtc");
}

static void look_nccl(finding *f)
{
    look_gpu_library(f, "nccl");
}

/* Looks for UCX as updates between hosts would use it. */
static void look_ucx(finding *f)
{
    char detail[sizeof f->detail];
    dray_error error;
    if (dray_transport_find("ucx", detail, sizeof detail, &error))
        missing(f, "%s", error.message);
    else
        found(f, "%s", detail);
}

static void look_curl(finding *f)
{
    char detail[sizeof f->detail];
    dray_error error;
    if (dray_store_find("s3", detail, sizeof detail, &error))
        missing(f, "%s", error.message);
    else
        found(f, "%s", detail);
}

/* ---- the table ------------------------------------------------------------------------------- */

typedef enum need { FACT, REQUIRED, OPTIONAL } need;

typedef struct check {
    const char *name;
    void (*look)(finding *f);
    need need;
    const char *unit; /* of the finding's value; NULL when it has none */
    const char *without;
} check;

static const char *const need_names[] = {"fact", "required", "optional"};

static const check checks[] = {
    {"kernel", look_kernel, FACT, NULL, ""},
    {"cores", look_cores, FACT, "cores", ""},
    {"memory", look_memory, FACT, "B", ""},
    {"copy rate", look_copy_rate, FACT, "B/s", ""},
    {"memfd", look_memfd, REQUIRED, NULL, "no shared regions: processes cannot hand weights over"},
    {"pidfd", look_pidfd, REQUIRED, NULL, "dray run cannot watch its processes"},
    {"landlock", look_landlock, OPTIONAL, NULL,
     "dray serve and dray keeper may write wherever their user may"},
    {"huge pages", look_huge_pages, OPTIONAL, NULL, "shared regions use 4 KiB pages"},
    {"/dev/shm", look_shm, OPTIONAL, "B", "PyTorch loaders beside dray may fail; dray uses memfd"},
    {"io_uring", look_io_uring, OPTIONAL, NULL, "files are read and written with plain calls"},
    {"libevent", look_libevent, REQUIRED, NULL, ""},
    {"jansson", look_jansson, REQUIRED, NULL, ""},
    {"xxhash", look_xxhash, REQUIRED, NULL, ""},
    {"hiredis", look_redis, OPTIONAL, NULL, "no queues whose bytes Redis holds"},
    {"libyaml", look_yaml, REQUIRED, NULL, ""},
    {"OpenBLAS", look_openblas, OPTIONAL, NULL,
     "dray run's built-in engine and trainer cannot compute: roles with a command alone"},
    {"CUDA driver", look_cuda, OPTIONAL, "devices",
     "no weights in GPU memory: host memory and files alone"},
    {"NVRTC", look_nvrtc, OPTIONAL, NULL,
     "no GPU kernels where the library was built without nvcc"},
    {"NCCL", look_nccl, OPTIONAL, NULL, "no transfers between GPUs of different hosts by NCCL"},
    {"UCX", look_ucx, OPTIONAL, NULL,
     "no RDMA between hosts: TCP streams; DRAY_TRANSPORT=ucx fails"},
    {"libcurl", look_curl, OPTIONAL, NULL, "no checkpoints in object stores (s3://...)"},
};

enum { CHECKS = sizeof(checks) / sizeof(checks[0]) };

static bool good(const check *c, const finding *f)
{
    return f->found || c->need != REQUIRED;
}

static void print_json(const finding *findings, size_t bad, bool measure)
{
    for (size_t i = 0; i < CHECKS; i++) {
        const check *c = &checks[i];
        const finding *f = &findings[i];
        json_t *line = json_pack("{s:s, s:b, s:s, s:s, s:s, s:b}", "name", c->name, "found",
                                 f->found, "detail", f->detail, "need", need_names[c->need],
                                 "without", c->without, "ok", good(c, f));
        if (line && c->unit)
            json_object_update_new(line,
                                   json_pack("{s:f, s:s}", "value", f->value, "unit", c->unit));
        cmd_json_line(line);
    }
    doctor_gpus_json(measure);
    cmd_json_line(
        json_pack("{s:s, s:b, s:s}", "name", "summary", "ok", bad == 0, "version", dray_version()));
}

static void print_table(const finding *findings, size_t bad, bool measure)
{
    static const char *const headings[] = {"what", "here", "found", "without it", NULL};
    cmd_table *table = cmd_table_new(headings);
    size_t off = 0;
    for (size_t i = 0; i < CHECKS; i++) {
        const check *c = &checks[i];
        const finding *f = &findings[i];
        cmd_cell(table, "%s", c->name);
        cmd_cell(table, "%s", f->found ? "yes" : "no");
        cmd_cell(table, "%s", f->detail);
        cmd_cell(table, "%s", f->found ? "" : c->without);
        off += !f->found;
    }
    cmd_table_print(table, stdout);
    doctor_gpus_table(measure);
    printf("\ndray %s: ", dray_version());
    if (bad)
        printf("%zu thing%s that dray needs %s missing.\n", bad, bad == 1 ? "" : "s",
               bad == 1 ? "is" : "are");
    else
        printf("everything that dray needs is here; %zu optional thing%s not.\n", off,
               off == 1 ? " is" : "s are");
}

typedef struct settings {
    bool json, measure;
} settings;

int cmd_doctor(int argc, char **argv)
{
    static const cmd_option options[] = {
        CMD_JSON(settings, json),
        CMD_FLAG(settings, measure, "measure", 'm',
                 "Measure the links of GPUs, too: a few seconds, 256 MiB each"),
        CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .doc = "Says what this machine has that dray can use, and what dray cannot do without the "
               "rest.\vFails only when something is missing that dray cannot run without."};
    settings s = {false, false};
    cmd_parse(&usage, argc, argv, &s);
    finding findings[CHECKS] = {0};
    size_t bad = 0;
    for (size_t i = 0; i < CHECKS; i++) {
        checks[i].look(&findings[i]);
        bad += !good(&checks[i], &findings[i]);
    }
    (s.json ? print_json : print_table)(findings, bad, s.measure);
    return bad ? CMD_FAILED : CMD_OK;
}
