/* kill -9 of producer, consumer, keeper and controller, at named steps and at random moments, for
 * every durability; with a journal also loss of power. The samples are then checked against a book
 * in memory that outlives the workers. It has their requests, and which ones were acknowledged. The
 * check claims rows, and never uses the queue's status.
 *
 * An acknowledged request has had its effect. One without an answer may have had it. One that was
 * never made has not.
 *
 * Sample n is slot n % ROWS of partition n / ROWS, and its prompt is n. A response is n and the
 * number of the attempt that wrote it. */
#pragma once

#include "base/hook.h"
#include "base/random.h"
#include "queue/fixture.h"
#include "queue/journal/journal.h"
#include "seed.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>

enum { PRODUCER, CONSUMER, KEEPER, CONTROLLER, ROLES, NOBODY };
enum { INSERT, ROLLOUT, REWARD, DEEDS };
enum { ROWS = 4, PARTITIONS = 6, SAMPLES = ROWS * PARTITIONS, OVER = 7 };

/* Marks of each sample, or of each partition. */
typedef struct marks {
    atomic_uchar deed[SAMPLES][DEEDS], cleared[PARTITIONS];
} marks;

typedef struct book {
    marks asked, acked;
    atomic_int attempts, value[SAMPLES]; /* the attempt whose commit was acknowledged */
    atomic_uchar sealed[PARTITIONS];
    atomic_int victim, countdown;
    atomic_int opened[2]; /* this worker has opened the queue, and learns when it ends */
    char step[16];
    atomic_llong synced, inode; /* the length of the journal that is safe, and its inode */
    /* The marks of the last acknowledged checkpoint. pending: a later one was requested. */
    marks least, most;
    atomic_int checkpoints, pending;
} book_t;

/* One case. */
typedef struct killing {
    int32_t durability;
    int victim;
    const char *step; /* NULL means a random moment */
    bool power;       /* the journal's unsynced bytes are lost */
    bool large;       /* rows are so large that the journal is compacted */
} killing;

static queue_fixture f;
static book_t *book;
static killing how;
static uint64_t seed, stream, draws;
static dray_context *context; /* the examiner's; the leak checker of later forks must see it */
static dray_queue *queue;
static pid_t pids[2];
static int kills;

static inline uint32_t draw(uint32_t below)
{
    return (uint32_t)(dray__random_u64(seed, stream, draws++) % below);
}

static inline void require_at(bool condition, const char *what, int n, int line)
{
    static const char *const roles[] = {"producer", "consumer", "keeper", "controller"};
    if (condition)
        return;
    fprintf(stderr, "kills.h:%d: sample %d: %s (durability %d, %s killed at %s%s, seed %llu)\n",
            line, n, what, (int)how.durability, roles[how.victim],
            how.step ? how.step : "a random moment", how.power ? ", power lost" : "",
            (unsigned long long)seed);
    abort();
}

#define REQUIRE(condition, n) require_at((condition), #condition, (n), __LINE__)

/* ---- where processes die --------------------------------------------------------------------- */

/* Finds the one journal in the folder. */
static inline bool journal_path(char *out, size_t size)
{
    DIR *dir = opendir(f.journals);
    out[0] = 0;
    for (struct dirent *entry; dir && (entry = readdir(dir));)
        if (strncmp(entry->d_name, "queue-", 6) == 0 && strstr(entry->d_name, ".journal") &&
            !strstr(entry->d_name, ".new"))
            snprintf(out, size, "%s/%.60s", f.journals, entry->d_name);
    if (dir)
        closedir(dir);
    return out[0] != 0;
}

static inline int count_records(void *user, const dray__journal_record *record, dray_error *said)
{
    (void)said;
    *(uint64_t *)user += record->seq != 0;
    return DRAY_OK;
}

/* Records that are whole before a sync begins are safe when it has returned. Another thread may
 * write meanwhile, so that the file itself is longer. */
static inline void note_synced(bool begins)
{
    static _Thread_local long long inode, end;
    char path[200];
    struct stat st;
    uint64_t at = 0, last, count = 0;
    if (!how.power) {
        return;
    } else if (!begins) {
        atomic_store(&book->inode, inode);
        atomic_store(&book->synced, end);
    } else if (journal_path(path, sizeof path) && stat(path, &st) == 0) {
        dray__journal_read(path, count_records, &count, &at, &last, NULL);
        inode = (long long)st.st_ino;
        end = (long long)at;
    }
}

static inline void at_step(void *user, const char *step)
{
    const int *role = user;
    if (*role == CONTROLLER && (strcmp(step, "syncing") == 0 || strcmp(step, "synced") == 0))
        note_synced(step[4] == 'i');
    if (atomic_load(&book->victim) == *role && strcmp(step, book->step) == 0 &&
        atomic_fetch_sub(&book->countdown, 1) == 1)
        kill(getpid(), SIGKILL);
}

static inline void be(int role)
{
    static int self;
    self = role;
    dray__hook_set(at_step, &self);
}

static inline void prepare_server(bool keeper)
{
    be(keeper ? KEEPER : CONTROLLER);
}

/* Takes away everything that was written after the last fdatasync that returned. The file may end
 * anywhere after that, and its bytes there may be others than were written. */
static inline void lose_power(void)
{
    char path[200];
    struct stat st;
    if (!journal_path(path, sizeof path) || stat(path, &st) < 0)
        return;
    if (atomic_load(&book->inode) != (long long)st.st_ino)
        return; /* it was written anew, and synced before it was renamed */
    off_t safe = (off_t)atomic_load(&book->synced);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    REQUIRE(fd >= 0 && safe <= st.st_size, -1);
    uint32_t behind = (uint32_t)(st.st_size - safe); /* usually not all of it was being written */
    if (draw(2) && behind > 4096)
        behind = 4096;
    off_t end = safe + (off_t)draw(behind + 1);
    REQUIRE(ftruncate(fd, end) == 0, -1);
    uint8_t noise[256];
    for (int torn = (int)draw(4); torn && end > safe; torn--) {
        off_t at = safe + (off_t)draw((uint32_t)(end - safe));
        size_t size = 1 + draw(sizeof noise);
        size = size < (size_t)(end - at) ? size : (size_t)(end - at);
        for (size_t i = 0; i < size; i++)
            noise[i] = draw(2) ? 0 : (uint8_t)draw(256);
        REQUIRE(pwrite(fd, noise, size, at) == (ssize_t)size, -1);
    }
    close(fd);
}

/* ---- the queue ------------------------------------------------------------------------------- */

static const char *const prompts[] = {"prompts"}, *const responses[] = {"responses"};
static const char *const both[] = {"prompts", "responses"};
static const dray_queue_task tasks[] = {
    {.name = "rollout", .needs = prompts, .needs_count = 1, .writes = responses, .writes_count = 1},
    {.name = "reward", .needs = both, .needs_count = 2},
    /* The examiner's tasks. They never commit, so that the rows stay as they are. */
    {.name = "inserted", .needs = prompts, .needs_count = 1},
    {.name = "rolled out", .needs = both, .needs_count = 2},
};

static inline const char *checkpoint_path(void)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/checkpoint", f.folder);
    return path;
}

static inline int open_queue(dray_context *of, const char *restore, dray_queue **out,
                             dray_error *said)
{
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    o.tasks = tasks;
    o.task_count = sizeof tasks / sizeof *tasks;
    o.max_attempts = 1000000; /* many attempts lose no row */
    o.durability = how.durability;
    o.restore = restore;
    return dray_queue_open(of, "samples", &o, out, said);
}

static inline dray_claim_options want(const char *task, uint32_t count, int64_t timeout_ns)
{
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = task;
    o.count = count;
    o.up_to = 1;
    o.timeout_ns = timeout_ns;
    return o;
}

static inline char *name_of(int partition)
{
    static char name[16];
    snprintf(name, sizeof name, "%d", partition);
    return name;
}

static inline int sample_of(const dray_batch *batch, uint32_t row)
{
    return atoi(dray_batch_partition(batch)) * ROWS + (int)dray_batch_row(batch, row)->slot;
}

/* Returns the length of a prompt, which repeats the sample's number. */
static inline uint64_t prompt_length(void)
{
    return how.large ? 1 << 19 : 2;
}

/* For workers. An error that another process's death explains ends them. Any other is a failure. */
static inline void over_or(int rc, const dray_error *said, int line)
{
    bool queue_ends = how.victim == CONTROLLER && how.durability != DRAY_DURABILITY_JOURNAL;
    if (!rc)
        return;
    if ((queue_ends && rc == DRAY_ECLOSED) || how.victim == KEEPER)
        _exit(OVER);
    fprintf(stderr, "kills.h:%d: %s: %s\n", line, dray_error_name(rc), said->message);
    require_at(false, "an said that nobody expects", -1, line);
}

#define GO(call) over_or((call), &error, __LINE__)

/* Opens a session and the queue. The coordinator may be killed meanwhile, and come back. */
static inline dray_context *worker_open(const char *name, dray_queue **out)
{
    dray_context *mine;
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = f.address;
    options.name = name;
    options.timeout_ns = 20 * DRAY__SECOND;
    int rc, tries = 0;
    do {
        rc = dray_open(&options, &mine, &error);
        if (!rc && (rc = open_queue(mine, NULL, out, &error)))
            dray_close(mine);
        usleep(rc ? 10000 : 0);
    } while (rc == DRAY_ECLOSED && how.victim == CONTROLLER &&
             how.durability == DRAY_DURABILITY_JOURNAL && tries++ < 400);
    GO(rc);
    return mine;
}

/* ---- the producer ---------------------------------------------------------------------------- */

static inline void ask(int n, int deed)
{
    atomic_store(&book->asked.deed[n][deed], 1);
}

static inline void insert(dray_queue *q, int partition)
{
    uint64_t length = prompt_length(), offsets[ROWS + 1];
    int32_t *values = malloc(ROWS * length * sizeof *values);
    for (uint64_t i = 0; i < ROWS * length; i++)
        values[i] = partition * ROWS + (int32_t)(i / length);
    for (uint64_t i = 0; i <= ROWS; i++)
        offsets[i] = i * length;
    dray_column_data column = {
        .name = "prompts", .dtype = DRAY_I32, .ndim = 1, .offsets = offsets, .values = values};
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = name_of(partition);
    o.rows = ROWS;
    o.columns = &column;
    o.column_count = 1;
    o.at_slot = 1;
    for (int i = 0; i < ROWS; i++)
        ask(partition * ROWS + i, INSERT);
    int rc = dray_queue_insert(q, &o, NULL, &error);
    free(values);
    if (rc != DRAY_EEXIST) /* an earlier producer inserted them, and was killed */
        GO(rc);
    for (int i = 0; i < ROWS; i++)
        atomic_store(&book->acked.deed[partition * ROWS + i][INSERT], 1);
}

static inline void acknowledged(int n, int deed)
{
    REQUIRE(atomic_fetch_add(&book->acked.deed[n][deed], 1) == 0, n); /* never twice */
}

/* Returns false when there will be no more rows. */
static inline bool roll_out(dray_queue *q, int64_t timeout_ns)
{
    dray_batch *batch;
    int32_t values[2 * ROWS];
    dray_claim_options o = want("rollout", 1 + draw(3), timeout_ns);
    int rc = dray_queue_claim(q, &o, &batch, &error);
    if (rc == DRAY_EEND || rc == DRAY_ETIMEDOUT)
        return rc != DRAY_EEND;
    GO(rc);
    int attempt = 1 + atomic_fetch_add(&book->attempts, 1);
    uint32_t rows = dray_batch_rows(batch);
    for (uint32_t i = 0; i < rows; i++) {
        values[2 * i] = sample_of(batch, i);
        values[2 * i + 1] = attempt;
    }
    dray_column_data column = {.name = "responses", .dtype = DRAY_I32, .ndim = 1, .values = values};
    column.shape[0] = 2;
    GO(dray_batch_set(batch, &column, &error));
    for (uint32_t i = 0; i < rows; i++)
        ask(sample_of(batch, i), ROLLOUT);
    rc = dray_batch_commit(batch, &error);
    if (rc != DRAY_ESTALE) { /* a restart has voided the claim */
        GO(rc);
        for (uint32_t i = 0; i < rows; i++) {
            atomic_store(&book->value[sample_of(batch, i)], attempt);
            acknowledged(sample_of(batch, i), ROLLOUT);
        }
    }
    dray_batch_free(batch);
    return true;
}

static inline void clear_if_done(dray_queue *q, int partition)
{
    if (partition < 0 || atomic_load(&book->acked.cleared[partition]))
        return;
    if (!atomic_load(&book->asked.cleared[partition])) {
        int rc = dray_queue_wait(q, name_of(partition), "reward", 20 * DRAY__MILLISECOND, &error);
        if (rc == DRAY_ETIMEDOUT)
            return;
        GO(rc);
    }
    atomic_store(&book->asked.cleared[partition], 1);
    GO(dray_queue_clear(q, name_of(partition), &error));
    atomic_store(&book->acked.cleared[partition], 1);
}

static inline void copy_marks(marks *to, const marks *from)
{
    memcpy((void *)to, (const void *)from, sizeof *to); /* any moment will do: counts only grow */
}

static inline void save(dray_queue *q)
{
    static marks least;
    if (how.durability == DRAY_DURABILITY_NONE || how.large)
        return;
    copy_marks(&least, &book->acked);
    atomic_store(&book->pending, 1);
    int rc; /* one that a killed producer requested may still be written */
    while ((rc = dray_queue_checkpoint(q, checkpoint_path(), &error)) == DRAY_EBUSY)
        usleep(1000);
    GO(rc);
    copy_marks(&book->least, &least);
    copy_marks(&book->most, &book->asked);
    atomic_fetch_add(&book->checkpoints, 1);
    atomic_store(&book->pending, 0);
}

static inline void produce(void *argument)
{
    (void)argument;
    dray_queue *q;
    be(PRODUCER);
    dray_context *mine = worker_open("producer", &q);
    atomic_store(&book->opened[PRODUCER], 1);
    for (int p = 0; p < PARTITIONS; p++) {
        if (!atomic_load(&book->acked.deed[p * ROWS][INSERT]))
            insert(q, p);
        if (!atomic_load(&book->sealed[p]) && !atomic_load(&book->asked.cleared[p]))
            GO(dray_queue_seal(q, name_of(p), ROWS, &error));
        atomic_store(&book->sealed[p], 1);
        roll_out(q, 0);
        roll_out(q, 0);
        clear_if_done(q, p - 2);
        save(q);
    }
    GO(dray_queue_end(q, &error));
    while (roll_out(q, DRAY__SECOND))
        ;
    clear_if_done(q, PARTITIONS - 2);
    leave(q, mine);
}

/* ---- the consumer ---------------------------------------------------------------------------- */

static inline void check_row(dray_batch *batch, uint32_t row, const dray_column *prompt,
                             const dray_column *response)
{
    int n = sample_of(batch, row);
    const int32_t *words = prompt->cells[row], *made = response ? response->cells[row] : NULL;
    REQUIRE(atomic_load(&book->asked.deed[n][INSERT]), n);
    REQUIRE(prompt->lengths[row] == prompt_length(), n);
    for (uint64_t i = 0; i < prompt->lengths[row]; i++)
        REQUIRE(words[i] == n, n);
    if (!made)
        return;
    REQUIRE(atomic_load(&book->asked.deed[n][ROLLOUT]), n);
    REQUIRE(made[0] == n, n);
    if (atomic_load(&book->acked.deed[n][ROLLOUT]))
        REQUIRE(made[1] == atomic_load(&book->value[n]), n);
}

static inline void consume(void *argument)
{
    (void)argument;
    dray_queue *q;
    dray_batch *batch;
    be(CONSUMER);
    dray_context *mine = worker_open("consumer", &q);
    atomic_store(&book->opened[CONSUMER], 1);
    int rc;
    for (;;) {
        dray_column prompt, response;
        dray_claim_options o = want("reward", 1 + draw(4), DRAY__SECOND);
        rc = dray_queue_claim(q, &o, &batch, &error);
        if (rc == DRAY_EEND)
            break;
        if (rc == DRAY_ETIMEDOUT)
            continue;
        GO(rc);
        rc = dray_batch_column(batch, "prompts", &prompt, &error);
        if (!rc)
            rc = dray_batch_column(batch, "responses", &response, &error);
        if (rc == DRAY_EGONE && how.victim >= KEEPER && how.durability == DRAY_DURABILITY_JOURNAL) {
            dray_batch_free(batch); /* the controller was killed before the rows were read */
            continue;
        }
        GO(rc);
        for (uint32_t i = 0; i < dray_batch_rows(batch); i++) {
            check_row(batch, i, &prompt, &response);
            ask(sample_of(batch, i), REWARD);
        }
        rc = dray_batch_commit(batch, &error);
        if (rc != DRAY_ESTALE) {
            GO(rc);
            for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
                acknowledged(sample_of(batch, i), REWARD);
        }
        dray_batch_free(batch);
    }
    leave(q, mine);
}

/* ---- the examiner ---------------------------------------------------------------------------- */

/* Sets found[slot] for the rows of the partition that the task can claim now, and values[slot] to
 * their responses. */
static inline void look(int partition, const char *task, bool read, bool found[ROWS],
                        int32_t values[ROWS])
{
    dray_batch *batch;
    dray_claim_options o = want(task, ROWS, 0);
    o.partition = name_of(partition);
    int rc = dray_queue_claim(queue, &o, &batch, &error);
    memset(found, 0, ROWS * sizeof *found);
    if (rc == DRAY_ETIMEDOUT || rc == DRAY_EEND || rc == DRAY_EGONE)
        return;
    OK(rc);
    dray_column prompt, response;
    bool made = strcmp(task, "inserted") != 0;
    if (read)
        OK(dray_batch_column(batch, "prompts", &prompt, &error));
    if (read && made)
        OK(dray_batch_column(batch, "responses", &response, &error));
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++) {
        uint32_t slot = dray_batch_row(batch, i)->slot;
        REQUIRE(!found[slot], sample_of(batch, i));
        found[slot] = true;
        if (read)
            check_row(batch, i, &prompt, made ? &response : NULL);
        if (read && made && values)
            values[slot] = ((const int32_t *)response.cells[i])[1];
    }
    dray_batch_free(batch);
}

/* Checks that everything in `least` is there, and nothing that is not in `most`. With `read`,
 * checks every byte, too. Then marks in the book what was found as acknowledged. */
static inline void examine(const marks *least, const marks *most, bool read)
{
    for (int p = 0; p < PARTITIONS; p++) {
        bool inserted[ROWS], rolled[ROWS], open[ROWS], gone;
        int32_t values[ROWS] = {0};
        look(p, "inserted", read, inserted, NULL);
        look(p, "rolled out", read, rolled, values);
        look(p, "reward", read, open, NULL);
        gone = !inserted[0];
        for (int i = 0; i < ROWS; i++) {
            int n = p * ROWS + i;
            REQUIRE(inserted[i] == inserted[0], n); /* all of an insert, or none */
            REQUIRE(!gone || !least->deed[n][INSERT] || most->cleared[p], n);
            REQUIRE(gone || most->deed[n][INSERT], n);
            REQUIRE(gone || !least->cleared[p], n);
            bool rewarded = rolled[i] && !open[i];
            REQUIRE(!rolled[i] || most->deed[n][ROLLOUT], n);
            REQUIRE(!rewarded || most->deed[n][REWARD], n);
            REQUIRE(gone || rolled[i] || !least->deed[n][ROLLOUT], n);
            REQUIRE(gone || rewarded || !least->deed[n][REWARD], n);
            if (read && rolled[i] && least->deed[n][ROLLOUT])
                REQUIRE(values[i] == atomic_load(&book->value[n]), n);
            if (gone && most->cleared[p])
                continue;
            book->acked.deed[n][INSERT] = book->asked.deed[n][INSERT] = inserted[i];
            book->acked.deed[n][ROLLOUT] = book->asked.deed[n][ROLLOUT] = rolled[i];
            book->acked.deed[n][REWARD] = book->asked.deed[n][REWARD] = rewarded;
            book->value[n] = values[i];
        }
        book->acked.cleared[p] = book->asked.cleared[p] = gone && most->cleared[p];
    }
}

/* ---- a case ---------------------------------------------------------------------------------- */

static inline void arm(int victim, const char *step)
{
    snprintf(book->step, sizeof book->step, "%s", step ? step : "");
    atomic_store(&book->countdown, 1 + (int)draw(step && how.large ? 2 : 6));
    atomic_store(&book->victim, step ? victim : NOBODY);
}

/* Stops killing. Returns true when the victim was killed just now. */
static inline bool disarm(void)
{
    atomic_store(&book->victim, NOBODY);
    return atomic_exchange(&book->countdown, 1 << 30) <= 0;
}

static inline void start_worker(int role)
{
    draws += 1000; /* its random numbers differ from the parent's */
    atomic_store(&book->opened[role], 0);
    pids[role] = child(role == PRODUCER ? produce : consume, NULL);
}

static inline void start_workers(void)
{
    start_worker(PRODUCER);
    start_worker(CONSUMER);
}

static inline pid_t *pid_of(int role)
{
    return role < KEEPER ? &pids[role] : role == KEEPER ? &f.keeper_pid : &f.coordinator_pid;
}

/* Returns the number of requests and acknowledgements, which only grows and is bounded. */
static inline int deeds_done(void)
{
    int done = 0;
    for (int p = 0; p < PARTITIONS; p++)
        done += book->sealed[p] + book->asked.cleared[p] + book->acked.cleared[p];
    for (int n = 0; n < SAMPLES; n++)
        for (int deed = 0; deed < DEEDS; deed++)
            done += book->asked.deed[n][deed] + book->acked.deed[n][deed];
    return done;
}

/* Returns the role of the process that ended. A minute without an end or a deed is a hang. The
 * whole case may take longer under a sanitizer on a busy machine. */
static inline int wait_for_end(int *status)
{
    int64_t deadline = dray__deadline(60 * DRAY__SECOND);
    for (int done = -1, before;; usleep(500)) {
        for (int role = 0; role < ROLES; role++)
            if (*pid_of(role) > 0 && waitpid(*pid_of(role), status, WNOHANG) == *pid_of(role))
                return role;
        before = done;
        if ((done = deeds_done()) != before)
            deadline = dray__deadline(60 * DRAY__SECOND);
        if (dray__now() >= deadline)
            fprintf(stderr, "stopped after %d deeds, pids %d %d %d %d\n", done, (int)pids[PRODUCER],
                    (int)pids[CONSUMER], (int)f.keeper_pid, (int)f.coordinator_pid);
        REQUIRE(dray__now() < deadline, -1);
    }
}

static inline bool killed(int status)
{
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

static inline void no_chunks(void)
{
    for (int i = 0; i < 2000 && kept_chunks(&f); i++)
        usleep(5000);
    REQUIRE(kept_chunks(&f) == 0, -1);
}

/* A worker that has opened the queue must end by itself. The others are killed. */
static inline void end_workers(void)
{
    int64_t deadline = dray__deadline(5 * DRAY__SECOND);
    for (int role = 0; role < KEEPER; role++) {
        int status = 0;
        if (pids[role] && !atomic_load(&book->opened[role]))
            fixture_end(pids[role], SIGKILL);
        while (pids[role] && atomic_load(&book->opened[role]) &&
               waitpid(pids[role], &status, WNOHANG) == 0) {
            REQUIRE(dray__now() < deadline, -1);
            usleep(500);
        }
        REQUIRE(status == 0 || (WIFEXITED(status) && WEXITSTATUS(status) == OVER), -1);
        pids[role] = 0;
    }
}

static inline void open_examiner(const char *restore)
{
    context = fixture_context(&f, "examiner");
    OK(open_queue(context, restore, &queue, &error));
}

static inline void close_examiner(void)
{
    leave(queue, context);
    queue = NULL;
    context = NULL;
}

/* Clears all partitions, after which no chunk may be left. */
static inline void account_for_memory(void)
{
    for (int p = 0; p < PARTITIONS; p++) {
        int rc = dray_queue_clear(queue, name_of(p), &error);
        if (rc != DRAY_ENOENT)
            OK(rc);
    }
    close_examiner();
    no_chunks();
}

/* Continues after the controller's death, with which a queue without a journal ends. */
static inline void queue_is_over(void)
{
    end_workers();
    if (queue) /* it belongs to a later controller */
        close_examiner();
    f.coordinator_pid = fixture_spawn(&f, false);
    no_chunks();
    bool saved = how.durability == DRAY_DURABILITY_CHECKPOINT && atomic_load(&book->checkpoints);
    if (!saved) { /* everything begins anew */
        memset(&book->asked, 0, sizeof book->asked);
        memset(&book->acked, 0, sizeof book->acked);
    }
    memset((void *)book->sealed, 0, sizeof book->sealed);
    open_examiner(saved ? checkpoint_path() : NULL);
    if (saved) {
        static marks most;
        copy_marks(&most, atomic_load(&book->pending) ? &book->asked : &book->most);
        copy_marks(&book->acked, &book->least);
        examine(&book->least, &most, true);
    }
    start_workers();
}

/* Continues after the keeper's death. Bytes that only it held are lost, but no task may get wrong
 * ones. A new controller restores them from a journal or a checkpoint. Without either, rows stay
 * until a task misses bytes, which must not happen before the examiner has counted them. */
static inline void keeper_is_gone(void)
{
    if (how.durability != DRAY_DURABILITY_JOURNAL)
        for (int role = 0; role < KEEPER; role++) {
            if (pids[role] > 0)
                fixture_end(pids[role], SIGKILL);
            pids[role] = 0;
        }
    unlink(f.keeper);
    f.keeper_pid = fixture_spawn(&f, true);
    if (how.durability == DRAY_DURABILITY_NONE)
        return;
    fixture_end(f.coordinator_pid, SIGKILL);
    if (how.durability == DRAY_DURABILITY_JOURNAL)
        f.coordinator_pid = fixture_spawn(&f, false);
    else
        queue_is_over();
}

static inline void victim_died(int role)
{
    kills++;
    disarm();
    if (role == CONTROLLER && how.power)
        lose_power();
    *pid_of(role) = 0;
    if (role == PRODUCER || role == CONSUMER)
        start_worker(role);
    else if (role == KEEPER)
        keeper_is_gone();
    else if (how.durability == DRAY_DURABILITY_JOURNAL)
        f.coordinator_pid = fixture_spawn(&f, false);
    else
        queue_is_over();
}

static inline void empty_folder(const char *path)
{
    DIR *dir = opendir(path);
    for (struct dirent *entry; dir && (entry = readdir(dir));)
        unlinkat(dirfd(dir), entry->d_name, 0);
    if (dir)
        closedir(dir);
}

static inline void one_ends(int *times)
{
    int status, role = wait_for_end(&status);
    bool over = WIFEXITED(status) && WEXITSTATUS(status) == OVER;
    if (killed(status) && role == how.victim) {
        victim_died(role);
        if (how.step && --*times > 0)
            arm(how.victim, how.step);
    } else if (over && how.victim == KEEPER && how.durability == DRAY_DURABILITY_JOURNAL) {
        start_worker(role);
    } else {
        REQUIRE(status == 0 || over, -1);
        *pid_of(role) = 0;
    }
}

static inline void kill_case(const killing *of, int times)
{
    memset(&f, 0, sizeof f);
    memset((void *)book, 0, sizeof *book);
    how = *of;
    stream++;
    draws = 0;
    f.prepare = prepare_server;
    snprintf(f.journals, sizeof f.journals, "%.60s/dray-kills-XXXXXX",
             getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    if (!mkdtemp(f.journals))
        die("mkdtemp", NULL);
    fixture_up(&f);
    if (getenv("DRAY_TEST_VERBOSE"))
        fprintf(stderr, "durability %d, victim %d, %s\n", how.durability, how.victim,
                how.step ? how.step : "");
    arm(how.victim, how.step);
    start_workers();
    bool dying = false;
    while (pids[PRODUCER] || pids[CONSUMER] || dying) {
        int before = kills;
        if (!how.step && times && !dying && *pid_of(how.victim) > 0) {
            usleep(draw(25000));
            kill(*pid_of(how.victim), SIGKILL);
            times--;
            dying = true;
        }
        one_ends(&times);
        dying = dying && kills == before && *pid_of(how.victim) > 0;
        if (!pids[PRODUCER] && !pids[CONSUMER] && how.step)
            dying = disarm();
    }
    if (!queue)
        open_examiner(NULL);
    bool read = how.victim != KEEPER || how.durability != DRAY_DURABILITY_NONE;
    bool complete = read;
    static marks least, most;
    copy_marks(&least, &book->acked);
    copy_marks(&most, &book->asked);
    examine(&least, &most, read);
    for (int n = 0; n < SAMPLES && complete; n++)
        for (int deed = 0; deed < DEEDS; deed++)
            REQUIRE(book->acked.deed[n][deed] || book->asked.cleared[n / ROWS], n);
    account_for_memory();
    unlink(checkpoint_path());
    char fresh[160];
    snprintf(fresh, sizeof fresh, "%s.new", checkpoint_path());
    unlink(fresh); /* of a checkpoint that was not finished */
    fixture_down(&f);
    empty_folder(f.journals);
    if (rmdir(f.journals) < 0)
        die("rmdir", NULL);
}

static inline void kills_begin(void)
{
    seed = test_seed();
    book = mmap(NULL, sizeof *book, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}
