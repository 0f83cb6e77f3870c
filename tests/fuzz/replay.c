/* Runs a fuzz target without libFuzzer (fuzz.h). Inputs run in a child; the parent keeps the one
 * during which the child died or stood still. */
#include "fuzz/fuzz.h"

#include "base/random.h"
#include "seed.h"

#include <dirent.h>
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

enum { INPUT_MAX = 1 << 20, ROUNDS = 300, STILL_SECONDS = 120 };

/* What the child runs, as the parent sees it. */
static struct shared {
    _Atomic uint64_t count;
    size_t size;
    uint8_t data[INPUT_MAX];
} * now;

static uint64_t seed, drawn;

static uint64_t below(uint64_t n)
{
    return dray__random_u64(seed, 0, drawn++) % n;
}

static void run(const uint8_t *data, size_t size)
{
    size = size < INPUT_MAX ? size : INPUT_MAX;
    uint8_t *copy = malloc(size + !size); /* where a sanitizer sees its end */
    if (!copy)
        abort();
    memcpy(copy, data, size);
    now->size = size;
    memcpy(now->data, data, size);
    now->count++;
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

/* A seed, and what becomes of it when bits flip, numbers grow, and it is cut or doubled. */
static void run_changed(const uint8_t *data, size_t size, int rounds)
{
    run(data, size);
    for (int i = 0; i < rounds; i++) {
        uint8_t *copy = malloc(2 * size + 16);
        if (!copy)
            abort();
        memcpy(copy, data, size);
        memcpy(copy + size, data, size);
        size_t length = below(8) ? size : below(2 * size + 1);
        for (uint64_t k = below(6); k-- > 0 && length;) {
            size_t at = below(length);
            uint64_t big = UINT64_MAX >> below(64);
            if (below(3))
                copy[at] ^= (uint8_t)(1u << below(8));
            else
                memcpy(copy + at, &big, 1 + below(8));
        }
        run(copy, length);
        free(copy);
    }
}

static void run_seed(void *user, const void *data, size_t size)
{
    const int *rounds = user;
    run_changed(data, size, *rounds);
}

typedef struct folder {
    const char *path;
    int count;
} folder;

static void write_seed(void *user, const void *data, size_t size)
{
    folder *to = user;
    char path[4096];
    snprintf(path, sizeof path, "%s/seed-%03d", to->path, to->count++);
    fuzz_write(path, data, size);
}

static void run_path(const char *path, int rounds)
{
    struct stat st;
    DIR *dir = stat(path, &st) == 0 && S_ISDIR(st.st_mode) ? opendir(path) : NULL;
    for (const struct dirent *entry; dir && (entry = readdir(dir));) {
        char name[4096];
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        if (entry->d_name[0] != '.')
            run_path(name, rounds);
    }
    if (dir) {
        closedir(dir);
        return;
    }
    uint8_t *data = malloc(INPUT_MAX);
    FILE *file = data ? fopen(path, "rb") : NULL;
    if (!file) {
        perror(path);
        exit(1);
    }
    run_changed(data, fread(data, 1, INPUT_MAX, file), rounds);
    fclose(file);
    free(data);
}

/* tests/fuzz/corpus/x of the target fuzz_x; none is fine. */
static void run_corpus(const char *program, int rounds)
{
    const char *source = getenv("DRAY_SOURCE_DIR"), *slash = strrchr(program, '/');
    char path[4096];
    snprintf(path, sizeof path, "%s/tests/fuzz/corpus/%s", source ? source : ".",
             (slash ? slash + 1 : program) + strlen("fuzz_"));
    if (access(path, F_OK) == 0)
        run_path(path, rounds);
}

static void run_all(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        run_path(argv[i], 0);
    if (argc > 1)
        return;
    seed = test_seed();
    int rounds = test_times(&fuzz_rounds ? fuzz_rounds : ROUNDS);
    fuzz_seeds(run_seed, &rounds);
    run_corpus(argv[0], test_times((&fuzz_rounds ? fuzz_rounds : ROUNDS) / 100));
    fprintf(stderr, "%" PRIu64 " inputs\n", now->count);
}

/* true: it ended by itself. */
static bool wait_for(pid_t child, int *status)
{
    uint64_t seen = 0;
    for (int still = 0; still < 10 * STILL_SECONDS; still++) {
        if (waitpid(child, status, WNOHANG) == child)
            return true;
        if (now->count != seen)
            still = 0;
        seen = now->count;
        nanosleep(&(struct timespec){.tv_nsec = seen && still ? 100000000 : 10000000}, NULL);
    }
    return false;
}

static int keep_input(void)
{
    char path[4096];
    const char *tmp = getenv("TMPDIR");
    snprintf(path, sizeof path, "%.4000s/dray-fuzz-input-XXXXXX", tmp ? tmp : "/tmp");
    int fd = mkstemp(path);
    if (fd >= 0 && write(fd, now->data, now->size) == (ssize_t)now->size)
        fprintf(stderr, "number %" PRIu64 " did it: %s\n", now->count, path);
    return 1;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--seeds") == 0) {
        folder to = {argv[2], 0};
        fuzz_seeds(write_seed, &to);
        return 0;
    }
    int status = 0;
    now = mmap(NULL, sizeof *now, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t child = now == MAP_FAILED ? -1 : fork();
    if (child < 0)
        abort();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        run_all(argc, argv);
        return 0;
    }
    if (!wait_for(child, &status)) {
        fprintf(stderr, "an input takes more than %d seconds\n", STILL_SECONDS);
        kill(child, SIGABRT);
        waitpid(child, &status, 0);
    }
    return status ? keep_input() : 0;
}
