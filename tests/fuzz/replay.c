/* Runs a fuzz target without libFuzzer (fuzz.h). */
#include "fuzz/fuzz.h"

#include "base/random.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum { INPUT_MAX = 1 << 20, ROUNDS = 300 };

static uint64_t seed, drawn;

static uint64_t below(uint64_t n)
{
    return dray__random_u64(seed, 0, drawn++) % n;
}

static void run(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size + !size); /* where a sanitizer sees its end */
    if (!copy)
        abort();
    memcpy(copy, data, size);
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

/* A seed, and what becomes of it when bits flip, numbers grow, and it is cut or doubled. */
static void run_seed(void *user, const void *data, size_t size)
{
    const int *rounds = user;
    run(data, size);
    for (int i = 0; i < *rounds; i++) {
        uint8_t *copy = malloc(2 * size + 16);
        if (!copy)
            abort();
        memcpy(copy, data, size);
        memcpy(copy + size, data, size);
        size_t now = below(8) ? size : below(2 * size + 1);
        for (uint64_t k = below(6); k-- > 0 && now;) {
            size_t at = below(now);
            uint64_t big = UINT64_MAX >> below(64);
            if (below(3))
                copy[at] ^= (uint8_t)(1u << below(8));
            else
                memcpy(copy + at, &big, 1 + below(8));
        }
        run(copy, now);
        free(copy);
    }
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
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(data, 1, size, file) != size || fclose(file)) {
        perror(path);
        exit(1);
    }
}

static void run_path(const char *path)
{
    struct stat st;
    DIR *dir = stat(path, &st) == 0 && S_ISDIR(st.st_mode) ? opendir(path) : NULL;
    for (const struct dirent *entry; dir && (entry = readdir(dir));) {
        char name[4096];
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        if (entry->d_name[0] != '.')
            run_path(name);
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
    run(data, fread(data, 1, INPUT_MAX, file));
    fclose(file);
    free(data);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--seeds") == 0) {
        folder to = {argv[2], 0};
        fuzz_seeds(write_seed, &to);
        return 0;
    }
    for (int i = 1; i < argc; i++)
        run_path(argv[i]);
    if (argc > 1)
        return 0;
    const char *given = getenv("DRAY_TEST_SEED"), *scale = getenv("DRAY_TEST_SCALE");
    seed = given ? strtoull(given, NULL, 10) : (uint64_t)time(NULL);
    fprintf(stderr, "DRAY_TEST_SEED=%" PRIu64 "\n", seed);
    int rounds = ROUNDS * (scale ? atoi(scale) : 1);
    fuzz_seeds(run_seed, &rounds);
    return 0;
}
