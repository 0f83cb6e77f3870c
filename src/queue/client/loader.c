/* Batches for a loop (loader.h). At most one claim is under way; the same message commits one batch
 * that the loop has finished. The states of a batch, in order: ready (claimed), open (given to the
 * loop), finished (to be committed), and freed. */
#include <dray/loader.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/options.h"
#include "queue/client/client.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>

typedef struct item {
    struct item *next;
    dray_batch *batch;
    uint64_t number, bytes;
    uint32_t parts, given, settled,
        failed; /* loads of the batch: all, handed out, done or failed, failed */
    uint32_t holds;
    bool confirmed; /* counted as committed, although the answer to its commit is still to come */
    bool *closed;   /* [part]: done or failed */
} item;

typedef struct item_list {
    item *first, **last;
    uint32_t count;
} item_list;

struct dray_loader {
    dray_queue *queue;
    dray_claim_options claim; /* its strings are the loader's own copies */
    char *task, *partition, *group, *cost;
    uint32_t ahead, ahead_rows;
    uint64_t ahead_bytes, last_bytes;
    bool micro;
    item_list ready, open, finished, held;
    item *committing; /* the item whose commit was sent with the claim */
    uint64_t ready_rows, ready_bytes;
    dray_error over;   /* the error that ends claiming; code 0 while there may be more rows */
    dray_error broken; /* the error of a commit that failed; reported once */
    dray_error late;   /* the error of a claim that timed out */
    dray_loader_counts counts;
};

/* ---- lists ----------------------------------------------------------------------------------- */

static void append(item_list *to, item *one)
{
    one->next = NULL;
    *to->last = one;
    to->last = &one->next;
    to->count++;
}

static void take(item_list *from, const item *one)
{
    item **at = &from->first;
    while (*at != one)
        at = &(*at)->next;
    *at = one->next;
    if (!*at)
        from->last = at;
    from->count--;
}

static void item_free(item *one)
{
    if (!one)
        return;
    dray_batch_free(one->batch);
    free(one->closed);
    free(one);
}

/* Frees an item whose work is over, or keeps it while its batch is held. */
static void part_from(dray_loader *loader, item *one)
{
    if (one && one->holds)
        append(&loader->held, one);
    else
        item_free(one);
}

/* Leaves the item. The holder of its batch frees the batch from now on. */
static void leave(item *one)
{
    if (one->holds)
        one->batch = NULL;
    item_free(one);
}

static void list_free(item_list *from)
{
    while (from->first) {
        item *one = from->first;
        from->first = one->next;
        leave(one);
    }
    *from = (item_list){.last = &from->first};
}

/* ---- opening --------------------------------------------------------------------------------- */

static char *copy_text(const char *text, bool *failed)
{
    char *copy = text ? strdup(text) : NULL;
    *failed |= text && !copy;
    return copy;
}

static int copy_claim(dray_loader *loader, const dray_claim_options *given, dray_error *error)
{
    dray_claim_options *claim = &loader->claim;
    bool failed = false;
    *claim = (dray_claim_options)DRAY_CLAIM_OPTIONS_INIT;
    int rc = given ? DRAY__OPTIONS_READ(dray_claim_options, max_hold_ns, claim, given, error)
                   : dray__fail(error, DRAY_EINVALID, "dray_loader_open: a claim expected");
    uint32_t task;
    if (!rc)
        rc = dray__queue_task(loader->queue, claim->task, &task, error);
    if (rc)
        return rc;
    claim->task = loader->task = copy_text(claim->task, &failed);
    claim->partition = loader->partition = copy_text(claim->partition, &failed);
    claim->group = loader->group = copy_text(claim->group, &failed);
    claim->cost = loader->cost = copy_text(claim->cost, &failed);
    return failed ? dray__nomem(error) : DRAY_OK;
}

static void loader_free(dray_loader *loader)
{
    list_free(&loader->ready);
    list_free(&loader->open);
    list_free(&loader->finished);
    list_free(&loader->held);
    if (loader->committing)
        leave(loader->committing);
    free(loader->task);
    free(loader->partition);
    free(loader->group);
    free(loader->cost);
    free(loader);
}

int dray_loader_open(dray_queue *queue, const dray_loader_options *options, dray_loader **out,
                     dray_error *error)
{
    dray_loader_options o = DRAY_LOADER_OPTIONS_INIT;
    int rc = dray__options_read(&o, sizeof o, sizeof o, options, "dray_loader_options", error);
    if (rc)
        return rc;
    dray_loader *loader = calloc(1, sizeof *loader);
    if (!loader)
        return dray__nomem(error);
    *loader = (dray_loader){.queue = queue,
                            .ahead = o.ahead ? o.ahead : 1,
                            .ahead_rows = o.ahead_rows ? o.ahead_rows : UINT32_MAX,
                            .ahead_bytes = o.ahead_bytes ? o.ahead_bytes : UINT64_MAX,
                            .micro = o.micro != 0,
                            .counts = DRAY_LOADER_COUNTS_INIT};
    loader->ready.last = &loader->ready.first;
    loader->open.last = &loader->open.first;
    loader->finished.last = &loader->finished.first;
    loader->held.last = &loader->held.first;
    rc = copy_claim(loader, o.claim, error);
    if (rc)
        loader_free(loader);
    else
        *out = loader;
    return rc;
}

/* ---- commits --------------------------------------------------------------------------------- */

/* Handles the answer to the batch's commit. An error is reported once, also when the commit was
 * superseded. */
static void committed(dray_loader *loader, item *one, int rc, const dray_error *error)
{
    loader->counts.committed += !rc && !one->confirmed;
    loader->counts.lost += rc != 0;
    if (rc && !loader->broken.code)
        loader->broken = *error;
    part_from(loader, one);
}

static void commit_first(dray_loader *loader)
{
    dray_error error;
    item *one = loader->finished.first;
    take(&loader->finished, one);
    committed(loader, one, dray_batch_commit(one->batch, &error), &error);
}

static int tell_broken(dray_loader *loader, dray_error *error)
{
    int code = loader->broken.code;
    if (code && error)
        *error = loader->broken;
    loader->broken.code = 0;
    return code;
}

/* ---- claims ---------------------------------------------------------------------------------- */

/* Sums the bytes of the columns that the task needs. This maps them, which the loop does next
 * anyway. */
static int bytes_of(dray_batch *batch, uint64_t *out, dray_error *error)
{
    int rc = DRAY_OK;
    *out = 0;
    for (uint32_t c = 0; !rc && c < batch->task->needs_count; c++) {
        dray_column column;
        rc = dray_batch_column(batch, batch->task->needs[c], &column, error);
        for (uint32_t i = 0; !rc && i < batch->row_count; i++)
            *out += column.lengths[i] * dray_dtype_size((dray_dtype)column.dtype);
    }
    return rc;
}

static int add_ready(dray_loader *loader, dray_batch *batch, dray_error *error)
{
    item *one = calloc(1, sizeof *one);
    if (one) {
        one->parts = loader->micro ? dray_batch_micros(batch) : 1;
        one->closed = calloc(one->parts, sizeof *one->closed);
    }
    int rc = one && one->closed ? DRAY_OK : dray__nomem(error);
    if (!rc && loader->ahead_bytes != UINT64_MAX)
        rc = bytes_of(batch, &one->bytes, error);
    if (rc) {
        free(one ? one->closed : NULL);
        free(one);
        dray_batch_free(batch);
        return rc;
    }
    one->batch = batch;
    one->number = loader->counts.batches + loader->ready.count;
    loader->last_bytes = one->bytes;
    loader->ready_rows += batch->row_count;
    loader->ready_bytes += one->bytes;
    loader->claim.round += loader->claim.policy == DRAY_POLICY_LOCKSTEP;
    append(&loader->ready, one);
    return DRAY_OK;
}

/* Takes the claim's answer, if it is there. */
static void take_answer(dray_loader *loader)
{
    dray_error error;
    dray_batch *batch = NULL;
    if (!loader->queue->started)
        return;
    int rc = dray_queue_claim_poll(loader->queue, NULL, &batch, &error);
    if (rc == DRAY_EAGAIN)
        return;
    item *rode = loader->committing;
    loader->committing = NULL;
    if (rode) {
        bool done = rode->batch->committed;
        int commit = done ? DRAY_OK : rc;
        if (commit == DRAY_ECLOSED) /* a restarted coordinator knows whether it was done */
            commit = dray_batch_commit(rode->batch, &error);
        committed(loader, rode, commit, &error);
        if (!done)
            return; /* without the commit nothing was claimed */
    }
    if (!rc)
        rc = add_ready(loader, batch, &error);
    if (rc == DRAY_ETIMEDOUT)
        loader->late = error;
    else if (rc && rc != DRAY_ECLOSED) /* ECLOSED is reported by the next request */
        loader->over = error;
}

/* Returns true when a claim may be sent: there is room to claim ahead, or the loop waits for a
 * batch (asked). */
static bool may_claim(const dray_loader *loader, bool asked)
{
    if (loader->queue->started || loader->over.code)
        return false;
    if (!loader->ready.count && asked)
        return true;
    return loader->ready.count < loader->ahead &&
           loader->ready_rows + loader->claim.count <= loader->ahead_rows &&
           loader->ready_bytes + loader->last_bytes <= loader->ahead_bytes &&
           (loader->ahead_bytes == UINT64_MAX || loader->last_bytes);
}

/* Sends a claim, together with the first waiting commit. */
static void send_claim(dray_loader *loader)
{
    dray_error error;
    item *rides = loader->finished.first;
    int rc = dray__claim_start_after(loader->queue, rides ? rides->batch : NULL, &loader->claim, 1,
                                     &error);
    if (rc == DRAY_EAGAIN)
        return; /* the socket is full: it is sent later */
    if (rc) {
        loader->over = error;
        return;
    }
    if (rides) {
        take(&loader->finished, rides);
        loader->committing = rides;
    }
}

/* Does the work that needs no wait for rows. */
static void advance(dray_loader *loader, bool asked)
{
    take_answer(loader);
    if (may_claim(loader, asked))
        send_claim(loader);
    while (asked && loader->finished.first) /* no claim to send it with: commits it alone */
        commit_first(loader);
}

/* Learns whether the commit that was sent with the claim was done: its answer may come only with
 * rows for the claim. Commits the batch once more, which is answered at once and changes nothing. A
 * refusal of the first commit is there by then. */
static int confirm(dray_loader *loader, dray_error *error)
{
    dray_error why;
    item *one = loader->committing;
    int rc = dray_batch_commit(one->batch, &why);
    if (!rc && !one->confirmed) {
        one->confirmed = true;
        loader->counts.committed++;
    }
    take_answer(loader);
    if (!rc || !loader->committing)
        return DRAY_OK;
    if (error)
        *error = why;
    return rc;
}

int dray_loader_flush(dray_loader *loader, dray_error *error)
{
    int rc = dray__queue_check_fork(loader->queue, error);
    if (!rc && loader->committing)
        rc = confirm(loader, error);
    while (!rc && loader->finished.first)
        commit_first(loader);
    if (!rc)
        advance(loader, false); /* claims ahead as far as it can by now */
    return rc ? rc : tell_broken(loader, error);
}

/* ---- handing out ----------------------------------------------------------------------------- */

/* Gives the first ready batch to the loop. Batches that were held too long meanwhile are freed. */
static int hand_over(dray_loader *loader, dray_error *error)
{
    item *one = loader->ready.first;
    take(&loader->ready, one);
    loader->ready_rows -= one->batch->row_count;
    loader->ready_bytes -= one->bytes;
    int rc = DRAY_OK;
    if (loader->claim.max_hold_ns > 0 && !loader->claim.peer)
        rc = dray_batch_hold(one->batch, loader->claim.max_hold_ns, error);
    if (rc) {
        item_free(one);
        for (item *later = loader->ready.first; later; later = later->next)
            later->number--;
        return rc;
    }
    append(&loader->open, one);
    loader->counts.batches++;
    loader->counts.rows += one->batch->row_count;
    return DRAY_OK;
}

/* Returns the open batch with loads that were not handed out; NULL when there is none. */
static item *with_more(const dray_loader *loader)
{
    item *one = loader->open.first;
    while (one && one->given == one->parts)
        one = one->next;
    return one;
}

static int give(dray_loader *loader, item *one, dray_load *out, dray_error *error)
{
    dray_load load = {.size = sizeof load,
                      .batch = one->batch,
                      .number = one->number,
                      .rows = one->batch->row_count,
                      .micro = one->given,
                      .micros = one->parts};
    int rc = DRAY_OK;
    if (loader->micro)
        rc = dray_batch_micro(one->batch, one->given, &load.first, &load.rows, error);
    if (rc)
        return rc;
    one->given++;
    dray__options_fill(out, &load, sizeof load);
    return DRAY_OK;
}

static int timed_out(dray_loader *loader, int64_t timeout_ns, dray_error *error)
{
    if (!timeout_ns)
        return dray__fail(error, DRAY_EAGAIN, "loader of %s: no batch yet", loader->task);
    const char *why = loader->late.code ? loader->late.message : "its claim has no answer yet";
    return dray__fail(error, DRAY_ETIMEDOUT, "loader of %s: no batch in %.3f s: %s", loader->task,
                      (double)timeout_ns / 1e9, why);
}

/* Waits for an answer. Returns false when the deadline has passed. */
static bool wait_until(const dray_loader *loader, int64_t deadline)
{
    if (loader->queue->start_lost) /* no answer comes */
        return true;
    struct pollfd fd = {.fd = dray_queue_fd(loader->queue), .events = POLLIN};
    return dray__wait(&fd, fd.fd >= 0, deadline) != 0;
}

/* Waits until a batch is ready or there is an error to report. */
static int wait_ready(dray_loader *loader, int64_t timeout_ns, dray_error *error)
{
    int64_t begin = dray__now(), deadline = dray__deadline(timeout_ns);
    bool over = false;
    for (int turn = 0;; turn++) {
        advance(loader, true);
        int rc = tell_broken(loader, error);
        if (rc || loader->ready.first) {
            if (turn)
                loader->counts.waited_ns += dray__now() - begin;
            return rc;
        }
        if (loader->over.code) {
            if (error)
                *error = loader->over;
            return loader->over.code;
        }
        if (over) {
            loader->counts.waited_ns += dray__now() - begin;
            return timed_out(loader, timeout_ns, error);
        }
        if (!timeout_ns)
            return timed_out(loader, 0, error);
        loader->counts.waits += !turn;
        over = !wait_until(loader, deadline);
    }
}

int dray_loader_next(dray_loader *loader, int64_t timeout_ns, dray_load *out, dray_error *error)
{
    int rc = dray__queue_check_fork(loader->queue, error);
    if (!rc)
        rc = dray__options_check(out, sizeof *out, "dray_load", error);
    if (rc)
        return rc;
    if (timeout_ns < 0)
        timeout_ns = loader->claim.timeout_ns;
    if (timeout_ns < 0)
        timeout_ns = dray__context_deadline(loader->queue->context, timeout_ns) - dray__now();
    item *one = with_more(loader);
    while (!one) {
        rc = wait_ready(loader, timeout_ns, error);
        if (rc)
            return rc;
        rc = hand_over(loader, error);
        if (rc && rc != DRAY_ESTALE && rc != DRAY_EGONE)
            return rc;
        one = with_more(loader);
        if (one)
            advance(loader, false); /* the next claim, while the loop works on this */
    }
    return give(loader, one, out, error);
}

/* ---- finishing ------------------------------------------------------------------------------- */

static int find_open(const dray_loader *loader, const dray_load *load, item **out,
                     dray_error *error)
{
    int rc = dray__queue_check_fork(loader->queue, error);
    if (!rc)
        rc = dray__options_check(load, sizeof *load, "dray_load", error);
    if (rc)
        return rc;
    for (item *one = loader->open.first; one; one = one->next)
        if (one->batch == load->batch && one->number == load->number && load->micro < one->given &&
            !one->closed[load->micro]) {
            *out = one;
            return DRAY_OK;
        }
    return dray__fail(error, DRAY_EINVALID,
                      "loader of %s: load %u of batch %llu is not in the loop's hands",
                      loader->task, load->micro, (unsigned long long)load->number);
}

/* Checks the outputs as the commit does later. */
static int check_outputs(const dray_loader *loader, const item *one, dray_error *error)
{
    const dray_batch *batch = one->batch;
    for (uint32_t i = 0; !loader->claim.peer && i < batch->task->writes_count; i++)
        if (!batch->outputs[i].name)
            return dray__fail(error, DRAY_EINVALID, "loader of %s: column %s was not set",
                              loader->task, batch->task->writes[i]);
    return DRAY_OK;
}

static void close_part(dray_loader *loader, item *one, uint32_t part, bool failed)
{
    one->closed[part] = true;
    one->failed += failed;
    if (++one->settled < one->parts)
        return;
    take(&loader->open, one);
    if (one->failed == one->parts || loader->claim.peer)
        part_from(loader, one); /* no row is left to commit, or another rank commits them */
    else
        append(&loader->finished, one);
    advance(loader, false);
}

int dray_loader_done(dray_loader *loader, const dray_load *load, dray_error *error)
{
    item *one = NULL;
    int rc = find_open(loader, load, &one, error);
    if (!rc && one->settled + 1 == one->parts)
        rc = check_outputs(loader, one, error);
    if (!rc)
        close_part(loader, one, load->micro, false);
    return rc;
}

/* Gives back the load's rows except padding, which another batch owns. */
static int fail_rows(const dray_load *load, const char *reason, dray_error *error)
{
    uint32_t *rows = malloc((load->rows ? load->rows : 1) * sizeof *rows), count = 0;
    if (!rows)
        return dray__nomem(error);
    for (uint32_t i = load->first; i < load->first + load->rows; i++)
        if (dray_batch_weight(load->batch, i) > 0)
            rows[count++] = i;
    int rc = count ? dray_batch_fail(load->batch, rows, count, reason, error) : DRAY_OK;
    free(rows);
    return rc;
}

int dray_loader_fail(dray_loader *loader, const dray_load *load, const char *reason,
                     dray_error *error)
{
    item *one = NULL;
    int rc = find_open(loader, load, &one, error);
    bool last = !rc && one->settled + 1 == one->parts;
    if (last && one->failed < one->settled) /* its other rows are committed later */
        rc = check_outputs(loader, one, error);
    if (!rc && !loader->claim.peer)
        rc = fail_rows(load, reason, error);
    if (rc == DRAY_ESTALE || rc == DRAY_EGONE) { /* they are given back already */
        rc = DRAY_OK;
        if (last)
            one->failed = one->settled;
    }
    if (!rc)
        close_part(loader, one, load->micro, true);
    return rc;
}

int dray_loader_hold(dray_loader *loader, const dray_load *load, dray_error *error)
{
    item *one = NULL;
    int rc = find_open(loader, load, &one, error);
    if (!rc)
        one->holds++;
    return rc;
}

void dray_loader_unhold(dray_loader *loader, const dray_batch *batch)
{
    const item_list *lists[] = {&loader->open, &loader->finished, &loader->held};
    item *one =
        loader->committing && loader->committing->batch == batch ? loader->committing : NULL;
    for (size_t i = 0; !one && i < sizeof lists / sizeof *lists; i++)
        for (one = lists[i]->first; one && one->batch != batch;)
            one = one->next;
    if (!one || !one->holds || --one->holds)
        return;
    for (const item *held = loader->held.first; held; held = held->next)
        if (held == one) {
            take(&loader->held, one);
            item_free(one);
            return;
        }
}

/* ---- ending ---------------------------------------------------------------------------------- */

/* Gives up the claim that was sent: asks the controller to forget it, and waits for its answer. */
static void give_up_claim(dray_loader *loader)
{
    int64_t deadline = dray__context_deadline(loader->queue->context, loader->queue->timeout_ns);
    take_answer(loader);
    if (loader->queue->started)
        dray__queue_release(loader->queue, loader->queue->started);
    while (loader->queue->started && wait_until(loader, deadline))
        take_answer(loader);
    take_answer(loader);
}

void dray_loader_close(dray_loader *loader)
{
    if (!loader)
        return;
    if (!dray__queue_check_fork(loader->queue, NULL)) {
        give_up_claim(loader);
        while (loader->finished.first && loader->broken.code != DRAY_ECLOSED)
            commit_first(loader);
    }
    if (loader->committing)
        loader->queue->committing = NULL; /* no answer came, and none is expected any more */
    loader_free(loader);
}

int dray_loader_count(const dray_loader *loader, dray_loader_counts *out, dray_error *error)
{
    int rc = dray__options_check(out, sizeof *out, "dray_loader_counts", error);
    if (rc)
        return rc;
    dray_loader_counts counts = loader->counts;
    counts.ready = loader->ready.count;
    counts.unfinished = loader->open.count;
    dray__options_fill(out, &counts, sizeof counts);
    return DRAY_OK;
}
