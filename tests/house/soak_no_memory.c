/* The C tests of the library, again and again, each time with another allocation of the library
 * that fails (no_memory.c, preloaded). A test may fail then, as it expects no failure; what may not
 * be is a crash, a complaint of the heap or of a sanitizer, or a test that does not end. Leaks are
 * looked for by test_no_memory.c: a test that gives up frees nothing.
 *
 *     house_soak_no_memory [PROGRAM [N]]     all programs; one; one with one number
 *
 * DRAY_TEST_SCALE: how many seconds a program is tried, after a first try. */
#include "house/no_memory.h"

#include "base/clock.h"
#include "seed.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PATIENCE_S = 120, OUTPUT = 1 << 20 };

static struct {
    volatile uint64_t at, count, failed;
} * shared; /* as in no_memory.c */

static const char *build;
static char state_path[128], output_path[128];
static char output[OUTPUT];

static void must(bool condition, const char *call)
{
    if (!condition) {
        perror(call);
        exit(1);
    }
}

#define MUST(condition) must((condition), #condition)

static void make_files(void)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(state_path, sizeof state_path, "%.80s/dray-test-XXXXXX", tmp ? tmp : "/tmp");
    snprintf(output_path, sizeof output_path, "%.80s/dray-test-XXXXXX", tmp ? tmp : "/tmp");
    int fd = mkstemp(state_path), other = mkstemp(output_path);
    MUST(fd >= 0 && other >= 0 && ftruncate(fd, 4096) == 0);
    shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    MUST(shared != MAP_FAILED);
    close(fd);
    close(other);
}

static void become(const char *program)
{
    char path[512], preload[512], options[1024];
    const char *asan = getenv("ASAN_OPTIONS");
    snprintf(path, sizeof path, "%s/%s", build, program);
    snprintf(preload, sizeof preload, "%s/libno_memory.so", build);
    const char *preloaded = getenv("LD_PRELOAD"); /* fork_locks.c, or none */
    if (preloaded)
        snprintf(preload + strlen(preload), sizeof preload - strlen(preload), ":%s", preloaded);
    snprintf(options, sizeof options, "%.800s:verify_asan_link_order=0:detect_leaks=0",
             asan ? asan : "");
    setenv("LD_PRELOAD", preload, 1);
    setenv("DRAY_NO_MEMORY", state_path, 1);
    setenv("ASAN_OPTIONS", options, 1);
    unsetenv("DRAY_TEST_SCALE");
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int fd = open(output_path, O_WRONLY | O_TRUNC);
    dup2(fd, 1);
    dup2(fd, 2);
    execl(path, path, (char *)NULL);
    _exit(127);
}

/* Its status, or -1: it did not end. The whole group of its processes ends with it. */
static int run(const char *program, uint64_t at)
{
    int status = 0;
    int64_t deadline = dray__deadline(PATIENCE_S * DRAY__SECOND);
    shared->count = shared->failed = 0;
    shared->at = at;
    pid_t pid = fork();
    MUST(pid >= 0);
    if (pid == 0)
        become(program);
    pid_t ended = 0;
    while (!ended && dray__now() < deadline) {
        ended = waitpid(pid, &status, WNOHANG);
        if (!ended)
            usleep(2000);
    }
    kill(-pid, SIGKILL);
    if (!ended)
        waitpid(pid, &status, 0);
    int fd = open(output_path, O_RDONLY);
    ssize_t size = read(fd, output, sizeof output - 1);
    output[size > 0 ? size : 0] = 0;
    close(fd);
    return ended ? status : -1;
}

/* What may not be; NULL: nothing. */
static const char *wrong_with(int status)
{
    static const char *const words[] = {
        "AddressSanitizer", "runtime error:",     "double free",          "free(): ",
        "malloc(): ",       "realloc(): ",        "corrupted ",           "munmap_chunk",
        "stack smashing",   "Segmentation fault", "failed with exception"};
    if (status == -1)
        return "it does not end";
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strstr(output, words[i]))
            return words[i];
    if (WIFSIGNALED(status) && WTERMSIG(status) != SIGABRT)
        return strsignal(WTERMSIG(status));
    return NULL;
}

static bool goes_well(const char *program, uint64_t at)
{
    const char *wrong = wrong_with(run(program, at));
    if (!wrong)
        return true;
    size_t length = strlen(output);
    printf("%s %" PRIu64 ": %s (addr2line -e %s/%s 0x%" PRIx64 ")\n%s\n", program, at, wrong, build,
           program, shared->failed, output + (length > 6000 ? length - 6000 : 0));
    return false;
}

static uint64_t draw(void)
{
    static uint64_t seed;
    if (!seed)
        seed = test_seed();
    seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
    return seed >> 20;
}

/* How many tries went wrong. */
static uint64_t try_program(const char *program, int64_t seconds, uint64_t *tried)
{
    uint64_t failed = 0, here = 0;
    int status = run(program, 0);
    uint64_t all = shared->count;
    if (status || !all) {
        printf("%s: left out, status %d, %" PRIu64 " allocations\n", program, status, all);
        return 0;
    }
    int64_t deadline = dray__deadline(seconds * DRAY__SECOND);
    do {
        failed += !goes_well(program, 1 + draw() % all);
        here++;
    } while (here < all && dray__now() < deadline);
    printf("%s: %" PRIu64 " of %" PRIu64 " allocations\n", program, here, all);
    *tried += here;
    return failed;
}

static int is_wanted(const struct dirent *entry)
{
    static const char *const folders[] = {"base_",  "trace_",   "model_",   "plan_", "memory_",
                                          "mover_", "control_", "weights_", "queue_"};
    const char *name = entry->d_name;
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
        if (strncmp(name, folders[i], strlen(folders[i])) == 0)
            return strncmp(name + strlen(folders[i]), "test_", 5) == 0 && !strchr(name, '.');
    return 0;
}

int main(int argc, char **argv)
{
    const char *more = getenv("DRAY_TEST_SCALE");
    int64_t seconds = more ? atoll(more) : 1;
    uint64_t failed = 0, tried = 0;
    struct dirent **names;
    build = getenv("DRAY_BUILD_DIR");
    MUST(build != NULL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    make_files();
    int count = argc > 1 ? 0 : scandir(build, &names, is_wanted, alphasort);
    for (int i = 0; i < count; i++) {
        failed += try_program(names[i]->d_name, seconds, &tried);
        free(names[i]);
    }
    if (count > 0)
        free(names);
    if (argc > 2)
        failed = !goes_well(argv[1], strtoull(argv[2], NULL, 10));
    else if (argc > 1)
        failed = try_program(argv[1], seconds, &tried);
    printf("%" PRIu64 " tries, %" PRIu64 " went wrong\n", tried, failed);
    unlink(state_path);
    unlink(output_path);
    return failed != 0;
}
