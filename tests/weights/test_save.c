/* Tests a run's checkpoints. Ranks write one together, writers are killed at every step and at
 * random moments, readers always find a whole version, disks fail, and the last N stay. */
#include "mover/disk.h"
#include "suite.h"
#include "weights/cluster.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { RANKS = 3 };

static char folder[128];
static dray_model_config config;
#define PATIENCE (60 * DRAY__SECOND) /* with other ranks */

FIXTURE(start)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%.64s/dray-test-XXXXXX", tmp ? tmp : "/tmp");
    assert_non_null(mkdtemp(folder));
    config = small_config(false, 3);
    config.hidden_size = 96;
#if defined(__SANITIZE_THREAD__) /* which looks at every element */
    config.intermediate_size = 1024;
#else
    config.intermediate_size = 4096;
#endif
    return 0;
}

FIXTURE(stop)
{
    char command[256];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

static int count_entries(const char *prefix)
{
    int count = 0;
    DIR *open = opendir(folder);
    for (struct dirent *entry; open && (entry = readdir(open));)
        count += strncmp(entry->d_name, prefix, strlen(prefix)) == 0;
    if (open)
        closedir(open);
    return count;
}

static uint32_t deltas; /* of all saves */
static uint64_t stays;  /* this version stays; 0: none */

enum { OF_PART = 1000 }; /* added to the seed of what lies beside the model */

/* A rank's save of `version`, which is also the seed of its values. */
static int save(dray_context *context, uint32_t rank, uint32_t world, uint64_t version,
                uint32_t keep, dray_error *said)
{
    dray_layout *layout;
    dray_region *region, *beside;
    dray_checkpoint_options options = DRAY_CHECKPOINT_OPTIONS_INIT;
    dray_checkpoint_part part = {"optimizer", NULL, &beside};
    dray_checkpoint_file file = {"note", &version, sizeof version};
    options.version = version;
    options.keep = keep;
    options.parts = &part;
    options.files = &file;
    options.part_count = options.file_count = 1;
    options.stay = &stays;
    options.stay_count = stays > 0;
    options.rank = rank;
    options.world = world;
    options.config_json = "{}";
    options.deltas = deltas;
    options.timeout_ns = PATIENCE;
    MUST(dray_layout_fsdp(&config, DRAY_F32, rank, world, DRAY_REGION_HOST, &layout, error));
    MUST(dray_regions_for_layout(layout, 1, &region, error));
    MUST(dray_regions_for_layout(layout, 1, &beside, error));
    fill(layout, &region, false, version);
    fill(layout, &beside, false, version + OF_PART);
    part.layout = layout;
    int rc = dray_checkpoint_save(context, folder, layout, &region, &options, said);
    dray_region_free(region);
    dray_region_free(beside);
    dray_layout_free(layout);
    return rc;
}

/* What lies beside the model came with it. */
static void check_beside(const char *path, const dray_layout *layout, dray_region *region,
                         uint64_t version)
{
    char name[256];
    uint64_t note = 0;
    snprintf(name, sizeof name, "%s/optimizer", path);
    poison(layout, &region);
    MUST(dray_checkpoint_read(name, layout, &region, error));
    CHECK(wrong_elements(layout, &region, false, version + OF_PART, DRAY_F32) == 0);
    snprintf(name, sizeof name, "%s/note", path);
    int fd = open(name, O_RDONLY | O_CLOEXEC);
    CHECK(read(fd, &note, sizeof note) == (ssize_t)sizeof note && note == version);
    close(fd);
}

/* Reads the newest version, as an engine rank of two would; 0: there is none. Aborts where it is
 * not exactly one version. */
static uint64_t read_newest(bool may_go, dray_error *said)
{
    char *path;
    uint64_t version = 0;
    dray_layout *layout;
    dray_region *region;
    int rc = dray_checkpoint_latest(folder, &version, &path, said);
    if (rc == DRAY_ENOENT)
        return 0;
    CHECK(rc == DRAY_OK);
    MUST(dray_layout_full(&config, DRAY_F32, DRAY_REGION_HOST, &layout, error));
    MUST(dray_regions_for_layout(layout, 1, &region, error));
    poison(layout, &region);
    rc = dray_checkpoint_read(path, layout, &region, said);
    if (rc && !may_go) {
        fprintf(stderr, "%s: %s\n", path, said->message);
        abort();
    }
    if (!rc)
        CHECK(wrong_elements(layout, &region, false, version, DRAY_F32) == 0);
    if (!rc && !may_go)
        check_beside(path, layout, region, version);
    dray_region_free(region);
    dray_layout_free(layout);
    dray_free(path);
    return rc ? 0 : version;
}

TEST_WITHIN(test_versions_and_retention, start, stop)
{
    dray_error said;
    assert_int_equal(read_newest(false, &said), 0);
    for (uint64_t version = 1; version <= 5; version++) { /* both ways to the disk */
        dray__disk_prefer(version % 2 ? DRAY__DISK_THREADS : DRAY__DISK_ANY);
        MUST(save(NULL, 0, 1, version, 2, error));
        assert_int_equal(read_newest(false, &said), version);
        assert_int_equal(count_entries("step-"), version < 2 ? 1 : 2);
    }
    dray__disk_prefer(DRAY__DISK_ANY);
    MUST(save(NULL, 0, 1, 4, 2, error)); /* went back, and wrote 4 again */
    assert_int_equal(read_newest(false, &said), 4);
    assert_int_equal(count_entries("step-000004"), 1);
    assert_int_equal(count_entries("step-000004.2"), 1);
    MUST(save(NULL, 0, 1, 4, 2, error)); /* and again: the one that it replaces does not count */
    assert_int_equal(read_newest(false, &said), 4);
    assert_int_equal(count_entries("step-"), 2);
    assert_int_equal(count_entries("step-000004.3"), 1);
    MUST(save(NULL, 0, 1, 6, 0, error)); /* all stay */
    assert_int_equal(count_entries("step-"), 3);
    assert_int_equal(count_entries("."), 2); /* and nothing else: "." and ".." */
    dray_checkpoint_options options = DRAY_CHECKPOINT_OPTIONS_INIT;
    options.rank = 3;
    dray_layout *layout;
    dray_region *region;
    MUST(dray_layout_full(&config, DRAY_F32, DRAY_REGION_HOST, &layout, error));
    MUST(dray_regions_for_layout(layout, 1, &region, error));
    assert_int_equal(dray_checkpoint_save(NULL, folder, layout, &region, &options, &said),
                     DRAY_EINVALID);
    options.rank = 0;
    options.world = 2;
    assert_int_equal(dray_checkpoint_save(NULL, folder, layout, &region, &options, &said),
                     DRAY_EINVALID);
    dray_region_free(region);
    dray_layout_free(layout);
}

/* What the options name beside the model is refused before anything is written. */
TEST_WITHIN(test_names_are_checked, start, stop)
{
    static const struct {
        const char *part, *file, *says;
    } cases[] = {{"", "note", "a name of"},
                 {"a/b", "note", "a name of"},
                 {".hidden", "note", "a name of"},
                 {"optimizer", "..", "a name of"},
                 {"optimizer", NULL, "(none)"},
                 {"optimizer", "optimizer", "two have the name 'optimizer'"},
                 {"optimizer", "config.json", "that a checkpoint has itself"},
                 {"model.safetensors", "note", "that a checkpoint has itself"},
                 {"optimizer", "delta.json", "that a checkpoint has itself"},
                 {"optimizer", "objects.json", "that a checkpoint has itself"}};
    dray_layout *layout;
    dray_region *region;
    dray_error said;
    MUST(dray_layout_full(&config, DRAY_F32, DRAY_REGION_HOST, &layout, error));
    MUST(dray_regions_for_layout(layout, 1, &region, error));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        dray_checkpoint_options options = DRAY_CHECKPOINT_OPTIONS_INIT;
        dray_checkpoint_part part = {cases[i].part, layout, &region};
        dray_checkpoint_file file = {cases[i].file, "x", 1};
        options.parts = &part;
        options.files = &file;
        options.part_count = options.file_count = 1;
        assert_int_equal(dray_checkpoint_save(NULL, folder, layout, &region, &options, &said),
                         DRAY_EINVALID);
        assert_non_null(strstr(said.message, cases[i].says));
    }
    assert_int_equal(count_entries("."), 2);
    assert_int_equal(count_entries("step-"), 0);
    dray_region_free(region);
    dray_layout_free(layout);
}

/* A version that stays does not count among those that are kept. */
TEST_WITHIN(test_a_version_stays, start, stop)
{
    stays = 1;
    for (uint64_t version = 1; version <= 5; version++)
        MUST(save(NULL, 0, 1, version, 2, error));
    stays = 0;
    assert_int_equal(count_entries("step-"), 3);
    assert_int_equal(count_entries("step-000001"), 1);
    assert_int_equal(count_entries("step-000004"), 1);
    MUST(save(NULL, 0, 1, 6, 2, error));
    assert_int_equal(count_entries("step-"), 2);
}

/* ---- several ranks --------------------------------------------------------------------------- */

typedef struct rank_job {
    uint32_t rank;
    uint64_t version;
    const char *step; /* where to die; NULL: nowhere */
    int fail;         /* errno of its disk */
    int expect;
    bool stays; /* nobody's session ends before the others have heard */
    int late;   /* after so many meetings it goes on when rank 0 has cleared up; 0: never */
} rank_job;

static void die_at(void *user, const char *step)
{
    rank_job *job = user;
    if (job->step && strcmp(step, job->step) == 0)
        kill(getpid(), SIGKILL);
    if (strcmp(step, "save met") == 0 && job->late-- == 1)
        for (int i = 0; i < 20000 && count_entries(".step-"); i++)
            usleep(1000);
}

static int bad_disk(void *user, const dray__io *io)
{
    return io->write ? *(const int *)user : 0;
}

static void save_rank(void *user)
{
    rank_job *job = user;
    char name[32];
    dray_error error = {0};
    snprintf(name, sizeof name, "rank-%u", job->rank);
    dray_context *context = fixture_open(&f, name, "trainer", job->rank);
    dray__hook_set(die_at, job);
    if (job->fail)
        dray__disk_faults(bad_disk, &job->fail);
    int rc = save(context, job->rank, RANKS, job->version, 2, &error);
    if (job->expect > 0 ? rc == DRAY_OK : rc != job->expect) {
        fprintf(stderr, "rank %u: %s: %s\n", job->rank, dray_error_name(rc), error.message);
        abort();
    }
    if (job->fail && job->rank == 1)
        CHECK(strstr(error.message, "tensor") && strstr(error.message, ".safetensors"));
    if (job->stays)
        CHECK(rc == (job->rank ? DRAY_ECANCELED : DRAY_EBUSY));
    if (job->stays)
        CHECK(dray_barrier(context, "heard", RANKS, 2 * PATIENCE, NULL) == DRAY_OK);
    dray_close(context);
}

static int late; /* of the last rank */

/* expect: DRAY_OK; or what all of them must hear; 1: any error. */
static void save_together(uint64_t version, uint32_t victim, const char *step, int fail, int expect)
{
    pid_t ranks[RANKS];
    rank_job jobs[RANKS];
    for (uint32_t i = 0; i < RANKS; i++) {
        jobs[i] = (rank_job){
            .rank = i, .version = version, .expect = expect, .stays = expect == 1 && !step};
        jobs[i].late = i == RANKS - 1 ? late : 0;
        if (i == victim) {
            jobs[i].step = step;
            jobs[i].fail = fail;
            jobs[i].expect = fail ? DRAY_ESYS : expect;
        }
        ranks[i] = spawn(save_rank, &jobs[i]);
    }
    for (uint32_t i = 0; i < RANKS; i++) {
        int status;
        assert_int_equal(waitpid(ranks[i], &status, 0), ranks[i]);
        bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        if (!(killed && step && i == victim))
            assert_int_equal(status, 0);
    }
}

TEST_WITHIN(test_ranks_write_together, start, stop)
{
    dray_error said;
    fixture_fork(&f, NULL);
    save_together(1, RANKS, NULL, 0, DRAY_OK);
    assert_int_equal(read_newest(false, &said), 1);
    save_together(2, RANKS, NULL, 0, DRAY_OK);
    assert_int_equal(read_newest(false, &said), 2);
    uint32_t compared;
    dray_checksums *sums;
    char *path;
    MUST(dray_checkpoint_latest(folder, NULL, &path, error));
    MUST(dray_checksums_of_checkpoint(path, &compared, &sums, error));
    assert_int_equal(compared, dray_checksums_count(sums));
    dray_checksums_free(sums);
    dray_free(path);

    save_together(3, 1, NULL, EIO, DRAY_ECANCELED); /* a rank's disk fails: all hear of it */
    assert_int_equal(read_newest(false, &said), 2);
    static const char *const steps[] = {"save laid out", "save begun", "save written"};
    for (uint32_t i = 0; i < 3; i++) { /* one who dies between two meetings is missed at once */
        int64_t begin = dray__now();
        save_together(4, i % 2, steps[i], 0, DRAY_EDEAD);
        assert_true(dray__now() - begin < PATIENCE / 2);
        assert_int_equal(read_newest(false, &said), 2);
    }
    for (uint32_t i = 0; i < 3; i++) { /* also by one who looks when the first has cleared up */
        static const int meetings[] = {2, 1, 4};
        late = meetings[i];
        save_together(4, 1, steps[i], 0, DRAY_EDEAD);
        late = 0;
    }
    save_together(5, RANKS, NULL, 0, DRAY_OK); /* what they left is cleared up */
    assert_int_equal(read_newest(false, &said), 5);
    assert_int_equal(count_entries("."), 2);

    int other = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* somebody else writes there */
    assert_int_equal(flock(other, LOCK_EX | LOCK_NB), 0);
    int64_t begin = dray__now();
    save_together(6, RANKS, NULL, 0, 1);
    assert_true(dray__now() - begin < PATIENCE / 2); /* the others do not wait for the first */
    close(other);
    fixture_stop(&f);
}

/* ---- killed writers, and readers beside them ------------------------------------------------- */

static void write_on_and_on(void *user)
{
    dray_error error;
    for (uint64_t version = *(const uint64_t *)user;; version++)
        if (save(NULL, 0, 1, version, 2, &error))
            abort();
}

static void fork_at(void *user, const char *step)
{
    pid_t *child = user;
    if (*child || strcmp(step, "save written") != 0)
        return;
    *child = fork();
    if (*child)
        return;
    pause();
    _exit(0);
}

/* A process that is forked while a checkpoint is written, such as a loader of data, lives on. It
 * does not keep others from writing the next one. */
TEST_WITHIN(test_forked_meanwhile, start, stop)
{
    pid_t child = 0;
    dray__hook_set(fork_at, &child);
    MUST(save(NULL, 0, 1, 1, 0, error));
    dray__hook_set(NULL, NULL);
    assert_true(child > 0);
    dray_error said = {0};
    int rc = save(NULL, 0, 1, 2, 0, &said);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
    if (rc)
        fprintf(stderr, "%s\n", said.message);
    assert_int_equal(rc, DRAY_OK);
    assert_int_equal(read_newest(false, &said), 2);
}

TEST_WITHIN(test_killed_writers, start, stop)
{
    static const char *const steps[] = {"save begun",    "save laid out", "save written",
                                        "save finished", "save named",    "save published"};
    dray_error said;
    uint64_t newest = 0;
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        pid_t writer = fork();
        if (writer == 0) {
            rank_job job = {.step = steps[i]};
            dray__hook_set(die_at, &job);
            save(NULL, 0, 1, i + 1, 2, &said);
            _exit(1); /* was not killed */
        }
        int status;
        assert_int_equal(waitpid(writer, &status, 0), writer);
        assert_true(WIFSIGNALED(status));
        uint64_t found = read_newest(false, &said);
        assert_true(found == newest || found == i + 1);
        assert_int_equal(found == i + 1, i == 5); /* the pointer decides */
        newest = found;
    }
    for (int round = 0; round < test_times(12); round++) {
        uint64_t first = newest + 1;
        pid_t writer = spawn(write_on_and_on, &first);
        usleep((useconds_t)(mix((uint64_t)round + (uint64_t)getpid()) % 60000));
        for (int i = 0; i < 3; i++) { /* beside the writer: old, new, or just removed */
            uint64_t found = read_newest(true, &said);
            assert_true(found == 0 || found >= newest);
        }
        kill(writer, SIGKILL);
        waitpid(writer, NULL, 0);
        uint64_t found = read_newest(false, &said);
        assert_true(found >= newest);
        newest = found;
    }
    MUST(save(NULL, 0, 1, newest + 1, 2, error));
    assert_int_equal(count_entries("."), 2);
    assert_int_equal(count_entries("step-"), 2);
}

/* A writer that died between the name and the pointer: the run goes on from the version before, and
 * writes that number again, under its own name, as nobody was led to the first one. */
TEST_WITHIN(test_a_number_that_was_never_published, start, stop)
{
    for (uint64_t before = 0; before < 2; before++) { /* nothing before it; one before it */
        if (before)
            MUST(save(NULL, 0, 1, 1, 2, error));
        pid_t writer = fork();
        if (writer == 0) {
            rank_job job = {.step = "save named"};
            dray__hook_set(die_at, &job);
            save(NULL, 0, 1, 2, 2, NULL);
            _exit(1); /* was not killed */
        }
        int status;
        assert_int_equal(waitpid(writer, &status, 0), writer);
        assert_true(WIFSIGNALED(status));
        assert_int_equal(count_entries("step-000002"), 1);
        MUST(save(NULL, 0, 1, 2, 2, error));
        assert_int_equal(read_newest(false, NULL), 2);
        assert_int_equal(count_entries("step-000002"), 1);
        assert_int_equal(count_entries("step-000002."), 0);
        char command[256];
        snprintf(command, sizeof command, "rm -rf '%s'/*", folder);
        assert_int_equal(system(command), 0);
    }
}

/* The same of versions that are kept as what changed, in a chain of three. */
TEST_WITHIN(test_killed_writers_of_deltas, start, stop)
{
    static const char *const steps[] = {"save written", "save named"};
    dray_error said;
    deltas = 3;
    fixture_fork(&f, NULL);
    uint64_t version = 1;
    for (; version <= 3; version++) { /* a whole one, and two deltas on it */
        save_together(version, RANKS, NULL, 0, DRAY_OK);
        assert_int_equal(read_newest(false, &said), version);
    }
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        save_together(version, 0, steps[i], 0, 1);
        uint64_t found = read_newest(false, &said);
        assert_true(found == version - 1 || (found == version && i == 1));
    }
    save_together(5, RANKS, NULL, 0, DRAY_OK);
    assert_int_equal(read_newest(false, &said), 5);
    fixture_stop(&f);
    uint64_t newest = 5;
    for (int round = 0; round < test_times(8); round++) {
        uint64_t first = newest + 1;
        pid_t writer = spawn(write_on_and_on, &first);
        usleep((useconds_t)(mix((uint64_t)round + (uint64_t)getpid()) % 60000));
        uint64_t found = read_newest(true, &said);
        assert_true(found == 0 || found >= newest);
        kill(writer, SIGKILL);
        waitpid(writer, NULL, 0);
        found = read_newest(false, &said);
        assert_true(found >= newest);
        newest = found;
    }
    MUST(save(NULL, 0, 1, newest + 1, 2, error));
    assert_int_equal(count_entries("."), 2);
    assert_true(count_entries("step-") <= 2 + 3);
    deltas = 0;
}

/* ---- steps that somebody touched ---------------------------------------------------------------
 */

static void entry_path(char out[256], const char *entry)
{
    snprintf(out, 256, "%.128s/%s", folder, entry);
}

TEST_WITHIN(test_damaged_bases, start, stop)
{
    char from[256], to[256], second[256];
    struct stat st;
    dray_error said;
    deltas = 3;
    MUST(save(NULL, 0, 1, 1, 2, error));
    MUST(save(NULL, 0, 1, 2, 2, error));
    entry_path(second, "step-000002");
    assert_int_equal(stat(second, &st), 0);
    const struct timespec times[2] = {st.st_mtim, st.st_mtim}; /* what is touched stays as old */
    /* which one step 2 builds on cannot be read for a while: what it may need stays */
    entry_path(from, "step-000002/delta.json");
    entry_path(to, "step-000002/aside");
    assert_int_equal(rename(from, to), 0);
    assert_int_equal(symlink("delta.json", from), 0);
    assert_int_equal(utimensat(AT_FDCWD, second, times, 0), 0);
    MUST(save(NULL, 0, 1, 3, 2, error));
    assert_int_equal(count_entries("step-000001"), 1);
    assert_int_equal(rename(to, from), 0);
    assert_int_equal(utimensat(AT_FDCWD, second, times, 0), 0);
    assert_int_equal(read_newest(false, &said), 3);
    /* the newest one's base is gone: the next is whole */
    MUST(save(NULL, 0, 1, 4, 2, error));
    entry_path(from, "step-000003");
    entry_path(to, "elsewhere");
    assert_int_equal(rename(from, to), 0);
    MUST(save(NULL, 0, 1, 5, 2, error));
    assert_int_equal(read_newest(false, &said), 5);
    deltas = 0;
}

/* ---- bad disks ------------------------------------------------------------------------------- */

static int failing_reads(void *user, const dray__io *io)
{
    return io->write ? 0 : *(const int *)user;
}

TEST_WITHIN(test_bad_disks, start, stop)
{
    dray_error said;
    int code = EIO;
    MUST(save(NULL, 0, 1, 1, 2, error));
    int full = ENOSPC;
    dray__disk_faults(bad_disk, &full);
    assert_int_equal(save(NULL, 0, 1, 2, 2, &said), DRAY_ESYS);
    dray__disk_faults(NULL, NULL);
    assert_int_equal(said.raw, ENOSPC);
    assert_true(strstr(said.message, "tensor ") && strstr(said.message, ".safetensors"));
    assert_int_equal(read_newest(false, &said), 1);
    assert_int_equal(count_entries("."), 2);
    dray__disk_faults(failing_reads, &code);
    assert_int_equal(read_newest(true, &said), 0);
    dray__disk_faults(NULL, NULL);
    assert_true(strstr(said.message, "tensor ") && strstr(said.message, ".safetensors"));
    char file[256];
    char *path;
    MUST(dray_checkpoint_latest(folder, NULL, &path, error));
    snprintf(file, sizeof file, "%s/model.safetensors", path);
    int fd = open(file, O_RDWR | O_CLOEXEC);
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    uint8_t byte;
    assert_int_equal(pread(fd, &byte, 1, st.st_size - 5), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, st.st_size - 5), 1); /* a bit that changed */
    close(fd);
    assert_int_equal(read_newest(true, &said), 0);
    assert_int_equal(said.code, DRAY_ECHECKSUM);
    assert_int_equal(truncate(file, st.st_size - 1000), 0);
    assert_int_equal(read_newest(true, &said), 0);
    assert_non_null(strstr(said.message, "model.safetensors"));
    dray_free(path);
}

SUITE(NULL, NULL)
