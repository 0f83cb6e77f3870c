/* Tests that successive updates leave nothing behind. Memory, descriptors and mappings stay as they
 * were after the first updates, in the process of trainer and engine and in the coordinator's.
 * There are 400 updates times DRAY_TEST_SCALE; 25 makes 10,000. */
#include "suite.h"
#include "weights/cluster.h"

#include <dirent.h>
#include <stdint.h>

typedef struct usage {
    long descriptors, mappings, resident_kib;
} usage;

static usage usage_of(pid_t pid)
{
    usage u = {0};
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *folder = opendir(path);
    CHECK(folder);
    while (readdir(folder))
        u.descriptors++;
    closedir(folder);
    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    FILE *file = fopen(path, "r");
    CHECK(file);
    /* Of GPU memory those of files alone: streams of the fake driver are threads, whose stacks are
     * mapped when two happen to run at once, and what is private is in the resident bytes, too. */
    while (fgets(line, sizeof line, file))
        u.mappings += cluster_kind == DRAY_REGION_SHARED || strchr(line, '/');
    fclose(file);
    /* The fake driver's GPU memory is shared memory. */
    const char *what = cluster_kind == DRAY_REGION_SHARED ? "VmRSS:" : "RssAnon:";
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    file = fopen(path, "r");
    CHECK(file);
    while (fgets(line, sizeof line, file))
        if (strncmp(line, what, strlen(what)) == 0)
            u.resident_kib = strtol(line + strlen(what), NULL, 10);
    fclose(file);
    return u;
}

static void check_flat(const char *who, usage before, usage after, long more_kib)
{
    print_message("%s: %ld -> %ld descriptors, %ld -> %ld mappings, %ld -> %ld KiB\n", who,
                  before.descriptors, after.descriptors, before.mappings, after.mappings,
                  before.resident_kib, after.resident_kib);
    assert_true(after.descriptors <= before.descriptors);
    bool alone = true; /* else a sanitizer's memory grows with that of the fake driver */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    alone = false;
#endif
    /* The allocator's arenas come and go; a sanitizer's keeps what was freed, and maps more for
     * each size that it keeps. */
    if (alone || cluster_kind == DRAY_REGION_SHARED)
        assert_true(after.mappings <= before.mappings + (alone ? 4 : 32));
    assert_true(!alone || after.resident_kib <= before.resident_kib + more_kib);
}

static void one_update(trainer *t, engine *e, uint64_t version)
{
    static const char *const kinds[] = {"update", "prefetch", "moved"};
    const char *kind = kinds[version % 7 == 0 ? 1 : version % 50 == 0 ? 2 : 0];
    if (strcmp(kind, "moved") == 0) {
        MUST(dray_publisher_move(t->publisher, t->region, error));
    }
    memory_flip(t->region[0], 0, 1);
    MUST(dray_publisher_publish(t->publisher, version, NULL, error));
    if (strcmp(kind, "prefetch") == 0) {
        MUST(dray_prefetch_weights(e->subscriber, NULL, NULL, error));
        MUST(dray_commit_weights(e->subscriber, NULL, NULL, error));
    } else {
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        options.strategy = (int32_t)(version % 3);
        MUST(dray_update_weights(e->subscriber, &options, NULL, error));
    }
    MUST(dray_publisher_wait(t->publisher, version, DRAY__SECOND, NULL, error));
}

TEST(test_updates_leave_nothing_behind)
{
    trainer t;
    engine e;
    dray_model_config config = small_config(false, 3);
    uint64_t version = 0, warm = 150, count = (uint64_t)test_times(400);
    cluster_start(state);
    trainer_open(&t, f.unix_address, &config, DRAY_F32, 0, 1, 1, cluster_kind);
    engine_open(&e, f.unix_address, &config, DRAY_F32, DRAY_BF16, "engine", 0, 1);
    while (version < warm)
        one_update(&t, &e, ++version);
    usage own = usage_of(getpid()), theirs = usage_of(f.process);
    while (version < warm + count)
        one_update(&t, &e, ++version);
    check_flat("trainer and engine", own, usage_of(getpid()), 2048);
    /* it keeps the last 8 MiB of reports, one an update */
    check_flat("coordinator", theirs, usage_of(f.process), 2048 + 2 * 8192);
    engine_close(&e);
    trainer_close(&t);
    cluster_stop(state);
}

CLUSTER_SUITE
