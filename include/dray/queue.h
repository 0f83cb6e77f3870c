/* queue.h - a streaming table between the tasks of the RL loop. Its rows are samples, its columns
 * are outputs of tasks. Producers write columns of the rows that they have claimed; consumers claim
 * rows whose columns are complete, and only the columns that they read are copied.
 *
 * Delivery is at least once. A task's output for a sample is committed once.
 *
 * Words: a partition has the rows of one global batch and a name. A row is addressed by partition,
 * slot and generation. Rows of one insert that share a prompt are a group. A task is a consumer. A
 * row is ready for a task when all columns that the task needs are committed, and the task has
 * neither taken nor committed nor lost the row. A claim takes rows for a task. A commit makes the
 * outputs and the acknowledgement of a claim visible in one step. A row that failed max_attempts
 * times, because it was given back with a reason or because the session that held it died, is lost;
 * on_loss decides what happens then.
 *
 * Values are in shared memory, which only the producer maps writable and which a keeper process
 * holds. Consumers on the same host read them in place. A column is freed when all tasks that need
 * it are done with the rows of its put, and everything when the partition is cleared, but never
 * while a batch that uses it is open.
 *
 * Threads: one thread at a time uses a queue and its batches; different threads may use different
 * queues, also of one context. After fork() the child gets DRAY_ECLOSED. Blocking: unless a
 * function says otherwise, it waits for one answer of the coordinator, up to the queue's timeout.
 * All functions can return DRAY_ECLOSED, DRAY_ETIMEDOUT and DRAY_ENOMEM. Since 0.1. */
#ifndef DRAY_QUEUE_H
#define DRAY_QUEUE_H

#include <dray/dray.h>
#include <dray/model.h>
#include <dray/trace.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dray_queue dray_queue;
typedef struct dray_batch dray_batch;

/* Names (queues, partitions, tasks, columns, tags) are 1 to 255 bytes of UTF-8 without control
 * characters. */
typedef struct dray_queue_task {
    const char *name;
    const char *const *needs; /* columns that must be committed before a row is ready */
    uint32_t needs_count;
    const char *const *writes; /* columns that the task commits, and nobody else; may be none */
    uint32_t writes_count;
} dray_queue_task;

/* How a lost row is replaced. */
typedef enum dray_on_loss {
    DRAY_ON_LOSS_DEFAULT = 0, /* refill */
    /* Its slot is emptied, and so are the slots of its group that the task has not committed. A
     * producer is asked for other samples (dray_queue_refill_wait), for which the partition waits.
     */
    DRAY_ON_LOSS_REFILL,
    DRAY_ON_LOSS_SHRINK_GROUP, /* the row is dead for all tasks that have not committed it */
    DRAY_ON_LOSS_DROP_GROUP    /* also the rows of its group that the task has not committed */
} dray_on_loss;

/* How much of a queue survives the death of its coordinator. */
typedef enum dray_durability {
    DRAY_DURABILITY_DEFAULT = 0, /* none */
    DRAY_DURABILITY_NONE,        /* nothing */
    DRAY_DURABILITY_CHECKPOINT,  /* the state that dray_queue_checkpoint saved last */
    /* Everything that was acknowledged, with its bytes. Answers wait until the journal is on the
     * disk. A coordinator that is started again with the same folder (dray serve --journal)
     * continues the queue. Calls wait for it up to their timeouts. Claims from before end: their
     * commits return DRAY_ESTALE unless they had been counted, and their unread columns may return
     * DRAY_EGONE. While the disk is full or fails, calls that change the queue return DRAY_EFULL or
     * DRAY_ESYS with the file's name, and their effect may come later. When a backend loses bytes,
     * they are restored from the journal: reading them returns DRAY_EGONE once, and the rows can be
     * claimed again. Bytes that were lost before the journal had them make the call return
     * DRAY_EDEAD, and the rows are lost (DRAY_LOSS_BYTES). */
    DRAY_DURABILITY_JOURNAL
} dray_durability;

/* The backend, which holds the bytes of columns for all users of the queue. */
typedef enum dray_queue_backend {
    /* builtin; for a queue without durability $DRAY_QUEUE_BACKEND may name another one: "builtin",
     * or "redis:" and an address */
    DRAY_BACKEND_DEFAULT = 0,
    DRAY_BACKEND_BUILTIN, /* shared memory of the host, read in place */
    /* A Redis server: "unix:/path" or "tcp:HOST:PORT", or several, separated by commas, as the
     * coordinator's list has it (dray serve --store). Without an address, the one in that list. Its
     * password is the first line of the file $DRAY_REDIS_PASSWORD_FILE, or else
     * $DRAY_REDIS_PASSWORD, in the environment of every user and of the coordinator. Values are
     * written before the inserting or committing call returns, and read when a column is first
     * looked at. Values that the server loses are DRAY_EGONE for their readers, and a loss of those
     * rows (DRAY_LOSS_BYTES), unless a journal has them. */
    DRAY_BACKEND_REDIS
} dray_queue_backend;

typedef struct dray_queue_options {
    size_t size;
    const dray_queue_task *tasks; /* the closed set; borrowed for the call */
    uint32_t task_count;
    uint64_t capacity_rows;  /* rows alive at once; 0 means 1,000,000 */
    uint64_t capacity_bytes; /* bytes of committed columns alive at once; 0 means 4 GiB */
    uint32_t max_attempts;   /* 0 means 3 */
    int64_t timeout_ns;      /* 0 means the context's */
    int32_t on_loss;         /* dray_on_loss */
    /* Tasks whose commits are provisional until a checkpoint covers them (dray_queue_cursor): the
     * rows that they have read are kept, and resuming undoes their commits. They write no
     * columns. */
    uint32_t provisional_count;
    const char *const *provisional;
    /* The job's needs; 0 when not known. Opening fails with DRAY_EFULL, which shows the arithmetic,
     * where (open_batches + checkpoint_batches - 1) * batch_rows rows, or row_bytes times as many
     * bytes, exceed the capacity. open_batches are open at once (staleness + 1). checkpoint_batches
     * come between two checkpoints (0 means 1) and wait for the second. */
    uint32_t batch_rows, open_batches, checkpoint_batches;
    uint64_t row_bytes;
    int32_t durability; /* dray_durability */
    /* A checkpoint that dray_queue_checkpoint wrote, named as there. A queue that does not exist
     * yet begins with its contents; tasks and limits must equal those in it. NULL: the queue begins
     * empty. DRAY_ENOENT: there is no checkpoint of this name. DRAY_ESYS: the file cannot be
     * opened. DRAY_EFORMAT: it is no checkpoint, or lacks its end. DRAY_EUNSUPPORTED: a path was
     * given, and the session is over TCP. */
    const char *restore;
    int32_t backend;             /* dray_queue_backend: where the bytes of columns are */
    const char *backend_address; /* the backend's; borrowed for the call. NULL or "": none */
} dray_queue_options;

#define DRAY_QUEUE_OPTIONS_INIT                                                                    \
    {                                                                                              \
        sizeof(dray_queue_options), NULL, 0, 0, 0, 0, 0, 0, 0, NULL, 0, 0, 0, 0, 0, NULL, 0, NULL  \
    }

/* Returns 1 when this library was built with the backend (a dray_queue_backend), else 0. Does not
 * block. Since 0.1. */
int dray_queue_backend_built(int32_t backend);

/* Opens the queue `name`, and creates it if it does not exist. Every caller may give the tasks, of
 * which there are at most 64; they must equal those that the queue was created with. Limits that
 * are 0 are not compared. With task_count 0 the call attaches to a queue that exists, and waits for
 * it up to the timeout. Where the coordinator dies during the call, the call waits for the next one
 * up to the timeout; it returns DRAY_ECLOSED where the coordinator had announced its end.
 * DRAY_EEXIST: the message names the difference. DRAY_EGONE: the queue was created without this
 * task, and may have freed samples of it. DRAY_EINVALID: two tasks write one column, or one task
 * needs and writes it. DRAY_EPERM: the backend's address is not in the coordinator's list. Owner:
 * the caller, until dray_queue_close; the context must outlive it. */
int dray_queue_open(dray_context *context, const char *name, const dray_queue_options *options,
                    dray_queue **out, dray_error *error);
/* Saves the queue as it is now, whole or not at all, in a file of mode 0600. options.restore
 * creates a queue from it, with any backend. Claims are not saved. file: a name ("step-7": 1 to 200
 * bytes of UTF-8, which do not begin with '.'), of a file in the coordinator's own folder (dray
 * serve --journal); or, where it has a '/', a path ("./step-7") of this host, which this process
 * opens and hands over: over a Unix socket alone. DRAY_EUNSUPPORTED: the queue's durability is
 * none, the coordinator has no folder, or a path was given over TCP. DRAY_EINVALID: this is no
 * name. DRAY_EBUSY: the queue is being saved. DRAY_EFULL, DRAY_ESYS: the disk. Blocks until the
 * file is on the disk. Since 0.1. */
int dray_queue_checkpoint(dray_queue *queue, const char *file, dray_error *error);
/* Ends this use of the queue; the queue itself lives as long as the coordinator. Rows that are
 * still claimed through it are given back. Its batches must be freed first. NULL is fine. */
void dray_queue_close(dray_queue *queue);
/* A descriptor that polls readable when a started claim has an answer. The queue owns it: do not
 * read or close it. Does not block. */
int dray_queue_fd(const dray_queue *queue);

/* ---- columns --------------------------------------------------------------------------------- */

typedef enum dray_content {
    DRAY_CONTENT_TENSOR = 0,
    DRAY_CONTENT_STRING, /* UTF-8; dtype U8, ragged */
    DRAY_CONTENT_BYTES,  /* dtype U8, ragged */
    DRAY_CONTENT_OBJECT  /* the same: an object that a program has serialised, for it to read */
} dray_content;

/* Values of one column for `count` rows, back to back in row order. A column gets its dtype and
 * shape from the first put and keeps them: DRAY_EDTYPE, DRAY_ESHAPE. DRAY_EINVALID: offsets that
 * go back, or lead behind `bytes`. Borrowed for the call. */
typedef struct dray_column_data {
    const char *name;
    int32_t dtype;
    int32_t content; /* dray_content */
    uint32_t ndim;   /* dimensions of one row's value; the first is ragged with offsets. 0: each row
                      * has one number, as in arrays of numpy and torch of shape (rows) */
    int64_t shape[DRAY_MAX_DIMS]; /* of one row; shape[0] ignored where ragged */
    const uint64_t *offsets;      /* count + 1, in units of shape[1..] slices; NULL: fixed shape */
    const void *values;
    uint64_t bytes; /* bytes at `values`: offsets beyond them are refused; 0 turns this check off */
} dray_column_data;

typedef struct dray_tag {
    const char *key;
    double number;
} dray_tag;

typedef struct dray_row_tag {
    uint32_t row; /* of the insert, from 0; of once_per_group: the group's number in it */
    const char *key;
    double number;
} dray_row_tag;

/* Tags that the queue itself reads: which version of the weights made the row (whole numbers; of
 * several commits the oldest counts for staleness), how urgent it is, how long. */
#define DRAY_TAG_VERSION "version"
#define DRAY_TAG_PRIORITY "priority"
#define DRAY_TAG_TOKENS "tokens"

typedef struct dray_row {
    uint32_t slot;       /* place within the partition */
    uint32_t generation; /* a stale address is an error, never another sample */
    uint32_t attempt;
    uint32_t group; /* group number within the partition */
    uint64_t id;    /* unique over the life of the queue */
} dray_row;

/* ---- producers ------------------------------------------------------------------------------- */

typedef struct dray_insert_options {
    size_t size;
    const char *partition;
    uint32_t rows;
    uint32_t group_size; /* rows of one prompt (GRPO's n), consecutive; 0 means 1. rows % group_size
                          * = 0; the same for every insert into a partition */
    int32_t once_per_group; /* columns and tags have one entry a group, not a row */
    const dray_column_data *columns;
    uint32_t column_count;
    const dray_tag *tags; /* tag_count tags, the same for every row of this insert */
    uint32_t tag_count;
    uint64_t row_bytes; /* declared worst case of all columns of a row, reserved now until the
                         * partition is cleared; 0: only committed bytes count */
    int64_t timeout_ns; /* how long to wait for capacity; 0: DRAY_EFULL at once */
    uint64_t at_slot;   /* 0: append; n: the rows must start at slot n - 1 */
    uint64_t refill;    /* id of the dray_refill that the rows answer; 0 when there is none.
                         * group_size, row_bytes and at_slot do not count then; once_per_group: one
                         * entry for all rows */
    /* Tags of single rows, or groups with once_per_group; of one key they count before `tags`. */
    const dray_row_tag *row_tags;
    uint32_t row_tag_count;
    uint32_t known_only; /* 1: a column that no task needs or writes is refused (DRAY_EINVALID) */
} dray_insert_options;

#define DRAY_INSERT_OPTIONS_INIT                                                                   \
    {                                                                                              \
        sizeof(dray_insert_options), NULL, 0, 0, 0, NULL, 0, NULL, 0, 0, DRAY_WAIT_DEFAULT, 0, 0,  \
            NULL, 0, 0                                                                             \
    }

/* Appends rows to the partition, which is created if it does not exist. All rows become visible, or
 * none. *first_slot gets the slot of the first row; it may be NULL. Inserts wait for capacity in
 * the order of their arrival. After DRAY_ETIMEDOUT or DRAY_ECLOSED the rows may have been inserted:
 * at_slot makes it safe to try again. DRAY_ETIMEDOUT (with timeout_ns 0: DRAY_EFULL): the message
 * has the missing rows or bytes. DRAY_EFULL, at once: the rows can never fit. DRAY_EEXIST: at_slot
 * is taken, or the partition was cleared, so the insert was done before. DRAY_EINVALID: the
 * partition is sealed, at_slot would leave a gap, a task writes the column, or (known_only) no task
 * has it. DRAY_EEND: a new partition after dray_queue_end. */
int dray_queue_insert(dray_queue *queue, const dray_insert_options *options, uint32_t *first_slot,
                      dray_error *error);

typedef enum dray_loss_cause {
    DRAY_LOSS_FAILED = 0,  /* max_attempts attempts */
    DRAY_LOSS_STALE,       /* too old for the task that claimed */
    DRAY_LOSS_ROLLED_BACK, /* of weights that no longer exist */
    DRAY_LOSS_BYTES        /* the backend lost bytes of it */
} dray_loss_cause;

/* Slots of one group of a partition that wait for another sample. */
typedef struct dray_refill {
    size_t size; /* sizeof(dray_refill), set by the caller */
    uint64_t id; /* for dray_insert_options.refill, and dray_queue_refill_decline */
    uint32_t rows;
    uint32_t slot, group; /* the first of them; its group's number */
    uint32_t attempts;    /* failed ones */
    int32_t cause;        /* dray_loss_cause */
    char partition[256];
    char task[256]; /* that lost the row */
    char reason[208];
} dray_refill;

#define DRAY_REFILL_INIT                                                                           \
    {                                                                                              \
        sizeof(dray_refill), 0, 0, 0, 0, 0, 0, {0}, {0},                                           \
        {                                                                                          \
            0                                                                                      \
        }                                                                                          \
    }

/* Waits until slots need another sample. Slots that lost theirs first come first. One producer at a
 * time is asked for each refill; when it closes the queue or dies without an answer, another one is
 * asked. A second call before the answer returns the same refill. The answer is dray_queue_insert
 * with options.refill = id: it takes exactly `rows` rows, needs no capacity, and works in sealed
 * partitions and after dray_queue_end. It returns DRAY_EEXIST where the refill was answered before,
 * or its partition was cleared. DRAY_EEND: the queue has ended, and every row is settled. Blocks up
 * to timeout_ns. */
int dray_queue_refill_wait(dray_queue *queue, int64_t timeout_ns, dray_refill *out,
                           dray_error *error);
/* Answers a refill without a sample: the rows are dead. A second call succeeds. */
int dray_queue_refill_decline(dray_queue *queue, uint64_t id, dray_error *error);

/* Fixes the partition's number of rows. DRAY_EINVALID: it has another number. DRAY_ENOENT: there is
 * no such partition. A second call succeeds. */
int dray_queue_seal(dray_queue *queue, const char *partition, uint32_t rows, dray_error *error);
/* Hides the partition's rows now, and frees them when the last batch that uses them is freed. The
 * partition need not be sealed. Claims on it end: their commits return DRAY_EGONE. A partition with
 * provisional commits is freed when a checkpoint covers them, and returns where they are undone.
 * Afterwards the name may be used again, for rows of another generation. DRAY_ENOENT: there never
 * was such a partition. A second call succeeds. */
int dray_queue_clear(dray_queue *queue, const char *partition, dray_error *error);
/* Waits until the partition is sealed, and `task` (NULL: every task) has committed or dropped
 * each of its rows that is not dead. The partition need not exist yet. timeout_ns 0 asks without
 * waiting. DRAY_ETIMEDOUT: the message has the task's progress. DRAY_EGONE: it was cleared
 * before. */
int dray_queue_wait(dray_queue *queue, const char *partition, const char *task, int64_t timeout_ns,
                    dray_error *error);
/* No more partitions will come: claims that can never be filled end with DRAY_EEND. */
int dray_queue_end(dray_queue *queue, dray_error *error);

/* Bounds asynchronous rollout: at any time the rows that `task` may still take are
 *     min(concurrency - running, (staleness + version + 1) * batch_rows - (accepted + running))
 * where running are the rows that it has begun, whether it holds them or left them open, and
 * accepted those that it has committed, less those lost afterwards. Its claims wait for that (a
 * short one is given where up_to allows); it may always claim begun rows again. */
typedef struct dray_admission {
    size_t size;
    const char *task;    /* NULL: rows count as accepted when they are inserted, and inserts wait */
    uint32_t batch_rows; /* of one training step */
    uint32_t staleness;  /* versions that a sample may be behind */
    uint32_t concurrency; /* 0: no bound */
    int32_t resume;       /* 1: accepted = version * batch_rows, as of a run that goes on */
    uint64_t version;     /* that the trainer has reached */
} dray_admission;

#define DRAY_ADMISSION_INIT                                                                        \
    {                                                                                              \
        sizeof(dray_admission), NULL, 0, 0, 0, 0, 0                                                \
    }

/* Sets the queue's admission, or changes it. DRAY_EINVALID: a version that goes back without
 * resume. */
int dray_queue_admit(dray_queue *queue, const dray_admission *admission, dray_error *error);
/* Tells the queue that the trainer has reached the version, so that more may be rolled out.
 * DRAY_EINVALID: the version is lower than the last one. */
int dray_queue_version(dray_queue *queue, uint64_t version, dray_error *error);

/* Checkpoints of provisional tasks. A trainer takes a cursor when it has committed the rows that
 * its state contains, stores it with the checkpoint of that version, and calls dray_queue_covered
 * when the checkpoint is safe; `resume` takes the queue back to it. */

/* Makes a cursor of all commits of provisional tasks so far. *out is malloc'ed. */
int dray_queue_cursor(dray_queue *queue, uint64_t version, void **out, size_t *size,
                      dray_error *error);
/* Tells the queue that a checkpoint with this cursor is safe. The queue frees the rows that it kept
 * for those commits, and partitions that were cleared before. A second call succeeds. DRAY_ESTALE:
 * a resume has undone some of the commits. DRAY_EFORMAT, DRAY_ECHECKSUM: this is no cursor.
 * DRAY_EINVALID: it is another queue's. */
int dray_queue_covered(dray_queue *queue, const void *cursor, size_t size, dray_error *error);
/* Takes the queue back to the cursor's checkpoint:
 *  - later commits of provisional tasks are undone: their rows are ready again, and claims of those
 *    tasks are void
 *  - rows of later versions are lost, as on_loss says, and claims made before cannot commit such
 *    versions (DRAY_ESTALE)
 *  - the admission's version is the cursor's again, and dray_queue_end is undone
 * *epoch: the run's epoch, raised by one; may be NULL. Errors as of
 * dray_queue_covered. */
int dray_queue_resume(dray_queue *queue, const void *cursor, size_t size, uint32_t *epoch,
                      dray_error *error);

/* ---- rows with keys -------------------------------------------------------------------------- */

/* A keyed partition has rows that every user of the queue may put, read and clear, without tasks
 * and claims. Its name differs from those of partitions above.
 *
 * A row has: a key, which is a string that no other row of the partition has, or no key; an
 * address, which is a slot and a generation (dray_row; its `attempt` is the row's version: how
 * often it was put); a tag of bytes, which the queue does not read; one value in each column that
 * was put. The first put of a column creates it. Each put of a column gives dtype and shape, so
 * rows of one column may differ. A row stays until it is cleared, however often it is read. A
 * partition ends with its last row; then its name is free.
 *
 * A put is visible in one step: a reader gets all of its values and tags, or none of them. Values
 * that were read stay unchanged until dray_batch_free. Of two puts of one key the later one counts,
 * column by column; replaced values are freed after their last reader.
 *
 * Consumers (`task` of dray_get_options) are names that need no declaration: at most 64 in a
 * partition. They have nothing to do with the tasks that the queue was opened with. */

/* Bytes that the caller owns. */
typedef struct dray_blob {
    const void *data; /* NULL when none were given */
    uint64_t size;
} dray_blob;

#define DRAY_PUT_ROWS_MAX 65536u   /* rows of one put */
#define DRAY_GET_ROWS_MAX 1048576u /* rows that one get names */
#define DRAY_ROW_TAG_MAX 65536u    /* bytes of a row's tag */

typedef struct dray_put_options {
    size_t size;
    const char *partition;
    uint32_t rows; /* at most DRAY_PUT_ROWS_MAX */
    /* Which ones, in the order of the values: */
    const char *const
        *keys;          /* [rows], different ones; a key that is not there makes a row. NULL: */
    const dray_row *at; /* [rows], different ones that exist, of which slot and generation count;
                         * NULL: new rows without keys */
    const dray_column_data *columns;
    uint32_t column_count;
    const dray_blob *tags; /* [rows]; data NULL: the row keeps the one that it has. NULL: all do */
    int64_t timeout_ns;    /* how long to wait for memory; 0: DRAY_EFULL at once */
} dray_put_options;

#define DRAY_PUT_OPTIONS_INIT                                                                      \
    {                                                                                              \
        sizeof(dray_put_options), NULL, 0, NULL, NULL, NULL, 0, NULL, DRAY_WAIT_DEFAULT            \
    }

/* Puts values and tags into rows, all or none; the partition is made if it does not exist. rows
 * (room for options->rows; may be NULL) gets their addresses and versions. Everything is borrowed
 * for the call. The bytes go into shared memory, the names and places to the coordinator in one
 * round trip. DRAY_EINVALID: a key twice, no rows, more rows than one put may have, or the name of
 * a partition whose rows are claimed. DRAY_ESTALE: `at` names a row that no longer exists.
 * DRAY_EFULL: no more rows or bytes fit (the call waits for bytes, not for rows). DRAY_EEND: a new
 * partition after dray_queue_end. After DRAY_ETIMEDOUT or DRAY_ECLOSED it may have counted: putting
 * the same under keys again is safe. Since 0.2 */
int dray_queue_put(dray_queue *queue, const dray_put_options *options, dray_row *rows,
                   dray_error *error);

typedef struct dray_get_options {
    size_t size;
    const char *partition;
    uint32_t rows;           /* with keys or at: how many, at most DRAY_GET_ROWS_MAX; without: 0,
                                the partition's, by slot */
    const char *const *keys; /* [rows] */
    const dray_row *at;      /* [rows], of which slot and generation count */
    /* The columns to read. Keys and tags come with every row. */
    const char *const *columns;
    uint32_t column_count;
    uint32_t all_columns; /* 1: every column of the partition instead */
    /* 1: the call leaves out keys and addresses that do not exist, and rows may lack columns:
     * dray_batch_cell, and functions that read such a column whole, then return DRAY_ENOENT. 0: the
     * call waits for them. */
    uint32_t partial;
    /* The consumer. Rows that it consumed before are left out, or refused where they are named
     * (DRAY_ESTALE); it consumes the rows that it gets, in the same step. NULL means no
     * consumer. */
    const char *task;
    uint32_t peek;      /* 1: with task: nothing is consumed */
    uint32_t count;     /* with task, how many of the partition's rows; 0 means all that are
                         * ready */
    uint32_t up_to;     /* 1: any number from 1 to count */
    int64_t timeout_ns; /* how long to wait for missing rows and values; 0: DRAY_EAGAIN at once */
} dray_get_options;

#define DRAY_GET_OPTIONS_INIT                                                                      \
    {                                                                                              \
        sizeof(dray_get_options), NULL, 0, NULL, NULL, NULL, 0, 0, 0, NULL, 0, 0, 0, 0             \
    }

/* Reads rows of a keyed partition. The batch has them in the order in which they were named, or by
 * slot; it is never empty. It is read as the batch of a claim, and ended with dray_batch_free. It
 * cannot be committed (DRAY_EPERM) or exported (DRAY_EUNSUPPORTED). The call sleeps until an answer
 * wakes it. DRAY_EAGAIN, or with a timeout DRAY_ETIMEDOUT: the message names the missing object:
 * the partition, a key, a row's column, or rows that the consumer has not consumed. DRAY_ESTALE: a
 * named row was cleared. DRAY_EEND: the partition does not exist, and dray_queue_end was called.
 * DRAY_EFULL: the answer would be too large, or batches that were not freed take all that the
 * coordinator's limit table-bytes allows. DRAY_EGONE: the keeper that held the bytes is gone.
 * Owner: the caller; the queue must outlive it. Since 0.2 */
int dray_queue_get(dray_queue *queue, const dray_get_options *options, dray_batch **out,
                   dray_error *error);
/* Clears rows of a keyed partition, named by keys or (keys NULL) by addresses, in one step. Rows
 * that do not exist are skipped. dray_queue_clear clears a whole partition. Since 0.2 */
int dray_queue_clear_rows(dray_queue *queue, const char *partition, const char *const *keys,
                          const dray_row *at, uint32_t rows, dray_error *error);
/* Forgets which of the partition's rows the consumer (NULL: every consumer) has consumed. An
 * unknown consumer or partition is no error. Since 0.2 */
int dray_queue_reset(dray_queue *queue, const char *partition, const char *task, dray_error *error);

/* ---- consumers ------------------------------------------------------------------------------- */

typedef enum dray_policy {
    DRAY_POLICY_FIFO = 0, /* in the order in which rows became ready */
    DRAY_POLICY_ORDERED,  /* ascending partition and slot, waiting for the next one */
    DRAY_POLICY_GROUP,    /* whole groups only, first complete first. count is a multiple of the
                             group's size; members that are dead, or committed before, are left
                             out but count */
    DRAY_POLICY_OLDEST_VERSION, /* oldest version first; rows without one before all */
    DRAY_POLICY_PRIORITY,       /* highest tag `priority` first (0 where there is none) */
    /* `count` rows, oldest version first, are divided among the dp_size ranks of the consumer group
     * so that their sums of tokens are nearly equal, and each rank's rows into micro-batches of at
     * most token_cap tokens and micro_rows rows. A claim gets the next share of its rank; shares
     * that other ranks have not asked for yet wait for them. No rank is left without rows: where
     * there are too few, it gets padding. */
    DRAY_POLICY_TOKEN_BALANCED,
    /* The same for collectives, in rounds that the ranks name: every rank gets the same number of
     * micro-batches, filled up with padding. Peers of a rank (tensor and pipeline parallel) share
     * its rows, the first of them commits. When a member of the group dies, or frees its batch
     * before it is committed, the round is void: its other batches get DRAY_ESTALE, as do claims
     * until the group comes back with a higher group_epoch. */
    DRAY_POLICY_LOCKSTEP
} dray_policy;

typedef enum dray_fresh {
    DRAY_FRESH_ANY = 0, /* claims take them as any other row */
    DRAY_FRESH_DROP,    /* claims drop them: they are lost, as on_loss says */
    DRAY_FRESH_LEFT     /* the claim leaves them, and groups that have one, to other claims; for
                           DRAY_POLICY_FIFO     and DRAY_POLICY_GROUP. Since 0.2 */
} dray_fresh;

typedef struct dray_claim_options {
    size_t size;
    const char *task;
    const char *partition; /* NULL: any, oldest first; a batch never spans partitions */
    uint32_t count;        /* rows wanted */
    int32_t up_to;         /* 1: any number from 1 to count; 0: exact, short only when a sealed
                              partition has no other rows that are neither taken nor done */
    int32_t policy;        /* dray_policy */
    int64_t timeout_ns;
    int64_t max_hold_ns; /* the claim is taken back after this; 0: it lives as long as the
                          * session */
    int32_t fresh; /* dray_fresh: the treatment of ready rows whose oldest version + staleness <
                    * version; rows without a version are taken in any case */
    uint32_t staleness;
    uint64_t version; /* of the trainer that consumes */
    /* For DRAY_POLICY_TOKEN_BALANCED and _LOCKSTEP; all members of a group give the same task,
     * count, dp_size, peers, token_cap and micro_rows. */
    const char *group;    /* the consumer group; NULL means the task's only one */
    uint64_t group_epoch; /* raised when the group is formed anew: claims of older ones are void */
    uint64_t round;       /* lockstep: which, ascending */
    uint64_t token_cap;   /* of a micro-batch; 0 for no cap. DRAY_EFULL names a row that is
                           * longer */
    const char *cost;     /* the tag with a row's tokens, 1 where it is missing; NULL means
                           * `tokens` */
    uint32_t dp_rank, dp_size; /* size 0: 1; at most 1,024 */
    uint32_t peer, peers;      /* lockstep: of those that share the rank's rows; peers 0: 1 */
    uint32_t micro_rows;       /* rows of a micro-batch; 0 means any */
} dray_claim_options;

#define DRAY_CLAIM_OPTIONS_INIT                                                                    \
    {                                                                                              \
        sizeof(dray_claim_options), NULL, NULL, 0, 0, 0, DRAY_WAIT_DEFAULT, 0, 0, 0, 0, NULL, 0,   \
            0, 0, NULL, 0, 0, 0, 0, 0                                                              \
    }

/* Takes rows for a task. The call sleeps until an answer wakes it. Claims that wait are tried in
 * the order of their arrival; one that cannot be filled does not delay those behind it.
 * DRAY_ETIMEDOUT: the message says how many rows are ready. DRAY_EEND: the task is done with the
 * named partition, or (no partition named) the queue has ended and no row can become ready.
 * DRAY_EGONE: the named partition was cleared before the task was done with it. DRAY_ENOENT: no
 * such task. Owner: the caller, until dray_batch_free; the queue must outlive it. Blocks up to
 * timeout_ns. */
int dray_queue_claim(dray_queue *queue, const dray_claim_options *options, dray_batch **out,
                     dray_error *error);
/* The first of several claims that can be filled, tried in the order given. *which is its index;
 * may be NULL. The first one's timeout counts. DRAY_EEND when all of them have ended. */
int dray_queue_claim_any(dray_queue *queue, const dray_claim_options *options, uint32_t count,
                         uint32_t *which, dray_batch **out, dray_error *error);
/* Not blocking: start, then poll (DRAY_EAGAIN until answered) when dray_queue_fd is readable. One
 * at a time (DRAY_EBUSY); other calls may come between. */
int dray_queue_claim_start(dray_queue *queue, const dray_claim_options *options, uint32_t count,
                           dray_error *error);
int dray_queue_claim_poll(dray_queue *queue, uint32_t *which, dray_batch **out, dray_error *error);

/* The number of rows, and the partition that they are of. Valid until dray_batch_free; do not
 * block. */
uint32_t dray_batch_rows(const dray_batch *batch);
const char *dray_batch_partition(const dray_batch *batch);
/* Returns the last cause of the claim's wait: DRAY_CAUSE_ADMISSION, when more rows were ready than
 * the queue's admission let the task begin; else DRAY_CAUSE_SAMPLES, also where it did not wait.
 * The span of a call that blocks has the cause by itself; a span of the caller's, around
 * dray_queue_claim_poll, gets it with dray_trace_waited_for. A claim whose time is over has the
 * cause in its error: origin DRAY_ORIGIN_WAIT, raw the cause. Threads: any. Since 0.1. */
dray_wait_cause dray_batch_waited_for(const dray_batch *batch);
/* Returns the address of a row; NULL when there is no such row. The batch's rows are an array in
 * this order. */
const dray_row *dray_batch_row(const dray_batch *batch, uint32_t index);
/* The micro-batches that the policy made of the batch (other policies: one), in row order. */
uint32_t dray_batch_micros(const dray_batch *batch);
int dray_batch_micro(const dray_batch *batch, uint32_t index, uint32_t *first, uint32_t *rows,
                     dray_error *error);
/* Returns 0 for padding: a copy of a row of this or another batch, which must not count in a loss,
 * and whose outputs are ignored. Returns 1 for other rows. */
double dray_batch_weight(const dray_batch *batch, uint32_t index);
/* The weights of `rows` rows from `first` on. DRAY_EINVALID: there are not so many. Since 0.1. */
int dray_batch_weights(const dray_batch *batch, uint32_t first, uint32_t rows, double *weights,
                       dray_error *error);
/* Tags as they were committed when the batch was claimed; of one key, the last commit's.
 * DRAY_ENOENT: the row has no such tag. Does not block. */
int dray_batch_tag(const dray_batch *batch, uint32_t index, const char *key, double *value,
                   dray_error *error);

/* The same of `rows` rows from `first` on: values[i] is left as it is where the row has no such
 * tag. DRAY_EINVALID: there are not so many rows. Since 0.1. */
int dray_batch_tags(const dray_batch *batch, const char *key, uint32_t first, uint32_t rows,
                    double *values, dray_error *error);

/* A column of all rows of the batch, read in place: cells[i] points into mapped memory, which stays
 * unchanged until dray_batch_free, also where the claim ends before. */
typedef struct dray_column {
    int32_t dtype, content;
    uint32_t ndim;
    int64_t shape[DRAY_MAX_DIMS]; /* of one row; shape[0] = -1 where ragged */
    const void *const *cells;
    const uint64_t *lengths; /* elements of each row's value */
} dray_column;

/* The column must be one that the task needs (DRAY_ENOENT), or one that it writes, where it left
 * rows open before. A value that was committed in pieces is read as one. cells and lengths are the
 * batch's. DRAY_EFORMAT: the producer's offsets lead outside its values; DRAY_ECLOSED,
 * DRAY_EUNSUPPORTED: the keeper is not there, or there is none; DRAY_EGONE: it lost the bytes, or
 * the claim is void since a coordinator was started anew. Waits for the keeper at the first read of
 * a chunk, and up to the queue's timeout for the coordinator's own one that is started again. Of a
 * batch of dray_queue_get with `partial`, a row without a value has cell NULL and length 0. */
int dray_batch_column(dray_batch *batch, const char *name, dray_column *out, dray_error *error);
/* The same, copied back to back into `out` (capacity bytes; DRAY_EFULL names the size needed).
 * DRAY_ENOENT also where a row that was got with `partial` has no value. */
int dray_batch_gather(dray_batch *batch, const char *name, void *out, size_t capacity,
                      size_t *bytes, dray_error *error);
/* The same of `rows` rows from `first` on. Since 0.1. */
int dray_batch_gather_rows(dray_batch *batch, const char *name, uint32_t first, uint32_t rows,
                           void *out, size_t capacity, size_t *bytes, dray_error *error);
/* Rows of a column, one after the other. */
typedef struct dray_column_part {
    int32_t dtype, content;
    uint32_t ndim, copied;        /* copied: 1 where the values were copied, else 0 */
    int64_t shape[DRAY_MAX_DIMS]; /* of one row; shape[0] = -1 where ragged */
    uint64_t bytes;               /* of the values together */
    const void *values;           /* as cells of dray_column, where the values follow one another in
                                   * mapped memory; NULL where they do not, or are empty */
} dray_column_part;

/* dray_batch_column and dray_batch_gather_rows in one call, for languages where a call costs more
 * than its work. offsets: room for rows + 1 of them. Row i of a ragged column is from offsets[i] to
 * offsets[i + 1], counted along the first dimension; for other columns the array is left as it is.
 * The values are copied into `room` where they have `capacity` bytes or fewer; more is no error.
 * Both are the caller's. Waits and errors are those of dray_batch_gather; DRAY_EINVALID: there are
 * not so many rows. Since 0.1. */
int dray_batch_read(dray_batch *batch, const char *name, uint32_t first, uint32_t rows,
                    dray_column_part *out, int64_t *offsets, void *room, size_t capacity,
                    dray_error *error);
/* The rows' values back to back, as dray_batch_gather_rows copies them, in memory of this process
 * alone, which may be written to: *out is a private mapping of the shared memory, of which the
 * system copies the pages that are written to; whoever else reads the values sees nothing of that,
 * and clearing the rows or putting others changes nothing here. *out NULL: there is no such
 * mapping, and the values are to be gathered. That is so of values that do not follow one another
 * in mapped memory or are empty, of batches that are not of dray_queue_get, and while the queue
 * holds more than a quarter of its capacity_bytes: the memory is the queue's until the batch is
 * freed. dray_batch_free, and a fork, copy the pages that were not written to; the pages of the
 * chunk that the values were in (those of other columns and rows, too) stay until dray_own_free,
 * also when the queue has given the chunk up. Owner: the caller, until dray_own_free. Waits and
 * errors are those of dray_batch_gather, and the keeper of the chunk may be asked once more; a
 * keeper that does not answer then is no error, *out is NULL. Since 0.2 */
int dray_batch_own(dray_batch *batch, const char *name, uint32_t first, uint32_t rows, void **out,
                   dray_error *error);
/* Ends what dray_batch_own gave, before or after its batch. Threads: any. NULL is fine. Waits while
 * dray_batch_free or a fork copies pages of other values. Since 0.2 */
void dray_own_free(void *values);
/* For batches of dray_queue_get. Does not block; the string is the batch's. Returns the row's key:
 * "" when it has none, NULL for other batches and rows. Since 0.2 */
const char *dray_batch_key(const dray_batch *batch, uint32_t index);
/* The row's tag of bytes; data NULL: it was never given one. Since 0.2 */
dray_blob dray_batch_row_tag(const dray_batch *batch, uint32_t index);
/* Returns the names of the columns that the batch can read, from 0 on; NULL when there are no more.
 * For any batch. Since 0.2 */
const char *dray_batch_column_name(const dray_batch *batch, uint32_t index);
/* One row's value of a column, in place, with the dtype and shape that it was put with; shape[0] is
 * how long it is, also where the put was ragged. Of any batch. dray_batch_column and the functions
 * above are for rows that are alike (DRAY_ESHAPE, DRAY_EDTYPE: two that are not). DRAY_ENOENT: the
 * row has no value in it. Waits and other errors are those of dray_batch_column. Since 0.2 */
int dray_batch_cell(dray_batch *batch, const char *name, uint32_t index, dray_column_part *out,
                    dray_error *error);
/* One commit's part of a row's value. */
typedef struct dray_piece {
    uint64_t elements;
    double version; /* the tag `version` of that commit; -1: it had none */
} dray_piece;

/* The pieces that the value of the row's column was committed in, first to last. *count: how many
 * there are; out gets the first `capacity` of them. */
int dray_batch_pieces(dray_batch *batch, const char *name, uint32_t index, dray_piece *out,
                      uint32_t capacity, uint32_t *count, dray_error *error);
/* Writes an output column for all rows of the batch, in batch order. Not visible before commit.
 * Setting it again replaces it. Copies the values; waits only where new memory is needed. */
int dray_batch_set(dray_batch *batch, const dray_column_data *column, dray_error *error);
int dray_batch_set_tag(dray_batch *batch, uint32_t index, const char *key, double value,
                       dray_error *error);
/* The same for `rows` rows from `first` on, a value each. Does not block. Since 0.1. */
int dray_batch_set_tags(dray_batch *batch, const char *key, uint32_t first, uint32_t rows,
                        const double *values, dray_error *error);
/* The next commit's values for these rows (places in the batch; row_count 0: all) are pieces: each
 * is appended to those that were committed for its row before. The rows stay open for the task,
 * which claims them again, before rows that it has not begun, those of the oldest version first. It
 * can then read the columns that it writes as far as they are. Others see them once a commit leaves
 * them not open. All columns that the task writes must be ragged. Calling it again replaces the
 * list. Does not block. */
int dray_batch_leave_open(dray_batch *batch, const uint32_t *rows, uint32_t row_count,
                          dray_error *error);
/* Commits outputs, tags and the acknowledgement in one step: all or none. Repeating it succeeds,
 * also after DRAY_ETIMEDOUT. DRAY_ESTALE: the claim was superseded, its outputs are freed.
 * DRAY_EGONE: the partition was cleared. DRAY_EINVALID: a column in `writes` was not set.
 * DRAY_EPERM: imported. */
int dray_batch_commit(dray_batch *batch, dray_error *error);
/* The same, and a claim as dray_queue_claim_any, in one round trip. After an error of the commit
 * nothing is claimed. After an error of the claim the batch is committed, and dray_batch_commit,
 * which does nothing then, tells the two apart. The batch is still the caller's to free. Blocks as
 * dray_queue_claim_any. */
int dray_batch_commit_claim(dray_batch *batch, const dray_claim_options *options, uint32_t count,
                            uint32_t *which, dray_batch **out, dray_error *error);
/* Gives rows back as failed attempts, with the reason (of which 200 bytes are kept). rows: places
 * in the batch; row_count 0: all of them. Rows that reach max_attempts are dead. A later commit is
 * of the other rows; columns are still set for all. */
int dray_batch_fail(dray_batch *batch, const uint32_t *rows, uint32_t row_count, const char *reason,
                    dray_error *error);
/* Gives all rows back now, not counted as an attempt. Their values that were read stay as they are
 * until dray_batch_free. As freeing it does, this ends a lockstep round. Blocks for one answer.
 * Since 0.1. */
int dray_batch_give_back(dray_batch *batch, dray_error *error);
/* Makes rows of the batch (places in it) a batch of their own, in this order, which is written,
 * committed, given back and freed by itself: rows that are through wait for no others. Their
 * columns and tags are read of `batch`, which keeps its places: columns are still set for all of
 * them, and a commit of it is of the rows that are left. Rows that it has not any more (given back,
 * or split off before) make the part's commit DRAY_ESTALE. DRAY_EINVALID: a rank's share
 * (token-balanced and lockstep claims) is not split. Does not wait for an answer. Owner: the
 * caller. Since 0.2 */
int dray_batch_split(dray_batch *batch, const uint32_t *rows, uint32_t row_count, dray_batch **out,
                     dray_error *error);
/* Renews a claim with max_hold: it is taken back after this many ns from now; 0: it lives as long
 * as the session. DRAY_ESTALE: too late. */
int dray_batch_hold(dray_batch *batch, int64_t max_hold_ns, dray_error *error);
/* Ends the batch: pointers from dray_batch_column are invalid now. A batch that was neither
 * committed nor failed gives its rows back, which counts as no attempt. NULL is fine. Does not wait
 * for an answer. */
void dray_batch_free(dray_batch *batch);
/* For the other ranks of a group: describe the batch here, open it read-only there (columns, rows
 * and tags; no commit). *out is malloc'ed. The exporter's batch must outlive the import's reads. */
int dray_batch_export(const dray_batch *batch, void **out, size_t *size, dray_error *error);
int dray_batch_import(dray_queue *queue, const void *data, size_t size, dray_batch **out,
                      dray_error *error);

/* State as JSON: {"name", "backend", "ended", "rows", "capacity_rows", "bytes", "hidden_bytes",
 * "capacity_bytes", "chunks", "chunk_bytes", "claims", "clients", "epoch", "admission": {"task",
 * "version", "batch_rows", "staleness", "concurrency", "running", "accepted", "room"}, "waiters":
 * {"claims": {task: n}, "inserts", "waits", "refills"}, "totals": {"inserted", "refilled", "lost":
 * {cause: rows}}, "columns_in": {column: {"rows", "bytes"}}, "tasks_out": {task: {"claims", "rows",
 * "bytes", "committed", "failed", "given_back"}}, "waited": [{"request", "task", "count",
 * "seconds", "buckets": up to 10 us, 100 us, 1 ms, 10 ms, 100 ms, 500 ms, 1 s, 5 s, 10 s, 1 min,
 * 10 min, longer}], all since the coordinator began; "columns": {column: {"dtype", "shape" of a
 * row, null for the dimension in which rows differ, "content": "tensor", "string", "bytes" or
 * "object"}}, as the column's first rows have fixed it;
 * "holders": [{"claim", "member", "name", "task", "partition", "rows"}], claims that are not
 * answered; "partitions": [{"name", "generation", "rows", "groups", "sealed", "dead", "vacant",
 * "refilled", "bytes", "reserved_bytes", "lost": {cause: rows}, "uncovered", "clearing", "columns":
 * {column: rows committed}, "tasks": {task:
 * {"ready", "taken", "committed", "dead", "finished"}}, "deaths": [{"slot", "generation", "task",
 * "cause", "attempts", "refilled", "reason"}]}], "keyed": [{"name", "generation", "rows",
 * "columns": {column: rows that have it}, "tasks": {task: rows consumed}}]}; cause is "failed",
 * "stale", "rolled_back" or "bytes_lost"; dead of a task counts rows that died in its hands, vacant
 * rows wait for another sample, deaths are the first 64 rows that died or were refilled. *out is
 * malloc'ed. */
int dray_queue_status(dray_queue *queue, char **out, dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
