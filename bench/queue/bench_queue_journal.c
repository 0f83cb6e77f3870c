/* Measures a queue with a journal. The limits are the same queue without a journal, and appending
 * as many bytes to a file beside it with as many fdatasyncs. Syncing a file that grows takes longer
 * than syncing one whose blocks were written before, as those of a journal were. No journal can be
 * faster than the latter, so that it is measured, too. */
#include "bench/queue/bench_queue.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    JOURNAL_COLUMNS = 8,
    COMMITS = 4,        /* of a round: insert, put, read, clear; each is acknowledged separately */
    RECORD_BYTES = 256, /* about the size of a commit without outputs */
    BLOCK = 10
};

typedef struct appended {
    int fd;
    off_t end;
} appended;

static appended open_file(const queue_bench *s)
{
    char path[160];
    snprintf(path, sizeof path, "%s/append", s->folder);
    appended f = {open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600), 0};
    if (f.fd < 0)
        bench_die(s->b, "%s: %s", path, strerror(errno));
    unlink(path);
    return f;
}

static void append(const queue_bench *s, appended *f, const uint8_t *data, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pwrite(f->fd, data + done, bytes - done, f->end);
        if (n <= 0)
            bench_die(s->b, "appending: %s", strerror(errno));
        done += (size_t)n;
        f->end += n;
    }
    if (fdatasync(f->fd) < 0)
        bench_die(s->b, "fdatasync: %s", strerror(errno));
}

/* Returns the seconds of writing the bytes that a round of put and read cannot avoid writing. */
static double append_round(const queue_bench *s, appended *f)
{
    double begin = bench_now();
    append(s, f, s->source, s->bytes);
    for (int i = 1; i < COMMITS; i++)
        append(s, f, s->source, RECORD_BYTES);
    return bench_now() - begin;
}

static double append_growing(const queue_bench *s)
{
    appended f = open_file(s);
    double seconds = append_round(s, &f);
    close(f.fd);
    return seconds;
}

static double append_again(const queue_bench *s, appended *f)
{
    f->end = 0;
    return append_round(s, f);
}

static double lesser(double a, double b)
{
    return a < b ? a : b;
}

static dray_queue *open_shape(queue_bench *s, const char *name, int32_t durability)
{
    queue_bench_shape(s, name, JOURNAL_COLUMNS, durability);
    return s->queue;
}

static double round_of(queue_bench *s, dray_queue *queue, const char *name, int32_t durability)
{
    s->queue = queue;
    s->name = name;
    s->durability = durability;
    return queue_bench_put_and_read(s);
}

static void bench_journal_bytes(queue_bench *s)
{
    static const char *const names[] = {"without a journal", "with a journal"};
    const int32_t none = DRAY_DURABILITY_NONE, journal = DRAY_DURABILITY_JOURNAL;
    unsigned repeats = bench_repeats(s->b);
    double *with = bench_alloc(s->b, 4 * (size_t)repeats, sizeof *with);
    double *without = with + repeats, *file = without + repeats, *again = file + repeats;
    s->bytes = bench_quick(s->b) ? (size_t)4 << 20 : (size_t)64 << 20;
    s->cell = s->bytes / JOURNAL_COLUMNS / SAMPLES;
    s->source = bench_alloc(s->b, s->bytes, 1);
    queue_bench_values(s->source, s->bytes);
    dray_queue *plain = open_shape(s, names[0], none), *safe = open_shape(s, names[1], journal);
    appended f = open_file(s);
    for (int i = 0; i < 2; i++) { /* the measured rounds use recycled memory */
        round_of(s, plain, names[0], none);
        round_of(s, safe, names[1], journal);
        append_again(s, &f);
    }
    for (unsigned r = 0; r < repeats; r++) {
        bench_doing(s->b, "put and read with a journal, round %u of %u", r + 1, repeats);
        file[r] = append_growing(s);
        again[r] = append_again(s, &f);
        without[r] = round_of(s, plain, names[0], none);
        with[r] = round_of(s, safe, names[1], journal);
    }
    bench_doing(s->b, NULL);
    double bytes = (double)s->bytes;
    double most = bytes / bench_percentile(without, repeats, 0.5),
           rate = bytes / bench_percentile(with, repeats, 0.5);
    bench_spread(s->b, with, repeats);
    bench_row(s->b, "put + read with a journal, against fdatasync of written blocks", rate, "B/s",
              lesser(most, bytes / bench_percentile(again, repeats, 0.5)), 0);
    bench_row(s->b, "the same, in times of what a file that grows takes",
              lesser(most, bytes / bench_percentile(file, repeats, 0.5)) / rate, "x", 0, 1 / 0.8);
    close(f.fd);
    dray_queue_close(plain);
    dray_queue_close(safe);
    free(s->source);
    free(with);
}

/* Single commits, each of which is waited for. The disk's own time changes from one moment to the
 * next. Therefore blocks of commits with a journal, of commits without one, and of appends are
 * interleaved. */
typedef struct commits {
    dray_queue *queue;
    dray_batch *batch;
    double *seconds;
    size_t count;
} commits;

static void open_commits(queue_bench *s, commits *c, const char *name, uint32_t rows,
                         int32_t durability)
{
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    c->queue = queue_bench_ready(s, name, rows, 1, 1, durability);
    c->seconds = bench_alloc(s->b, rows / CLAIM, sizeof *c->seconds);
    o.task = "t0";
    o.count = CLAIM;
    BENCH_MUST(s->b, dray_queue_claim(c->queue, &o, &c->batch, error));
}

static void commit_block(const queue_bench *s, commits *c)
{
    for (int i = 0; i < BLOCK; i++) {
        dray_batch *next;
        dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
        o.task = "t0";
        o.count = CLAIM;
        double begin = bench_now();
        BENCH_MUST(s->b, dray_batch_commit_claim(c->batch, &o, 1, NULL, &next, error));
        c->seconds[c->count++] = bench_now() - begin;
        dray_batch_free(c->batch);
        c->batch = next;
    }
}

static double close_commits(commits *c)
{
    double p50 = bench_percentile(c->seconds, c->count, 0.5);
    dray_batch_free(c->batch);
    dray_queue_close(c->queue);
    free(c->seconds);
    return CLAIM / p50;
}

/* Appends BLOCK records, and adds the seconds of each at seconds[*count] onwards. */
static void append_block(const queue_bench *s, appended *f, double *seconds, size_t *count)
{
    static const uint8_t record[RECORD_BYTES];
    for (int k = 0; k < BLOCK; k++) {
        double begin = bench_now();
        append(s, f, record, sizeof record);
        seconds[(*count)++] = bench_now() - begin;
    }
}

static void bench_journal_commits(queue_bench *s)
{
    uint32_t blocks = bench_quick(s->b) ? 2 : 20, rows = (blocks * BLOCK + 1) * CLAIM;
    size_t grown = 0, written = 0, all = (size_t)blocks * BLOCK;
    commits with = {0}, without = {0};
    double *growing = bench_alloc(s->b, 2 * all, sizeof *growing), *again = growing + all;
    uint8_t *zeros = bench_alloc(s->b, all, RECORD_BYTES);
    open_commits(s, &with, "commits with a journal", rows, DRAY_DURABILITY_JOURNAL);
    open_commits(s, &without, "commits without", rows, DRAY_DURABILITY_NONE);
    appended f = open_file(s), g = open_file(s);
    append(s, &g, zeros, all * RECORD_BYTES);
    g.end = 0;
    for (uint32_t i = 0; i < blocks; i++) {
        bench_doing(s->b, "commits with a journal, %u of %u", i + 1, blocks);
        commit_block(s, &with);
        commit_block(s, &without);
        append_block(s, &f, growing, &grown);
        append_block(s, &g, again, &written);
    }
    bench_doing(s->b, NULL);
    close(f.fd);
    close(g.fd);
    double most = close_commits(&without), rate = close_commits(&with);
    bench_row(s->b, "commits of 32 with a journal, samples, against fdatasync of written blocks",
              rate, "1/s", lesser(most, CLAIM / bench_percentile(again, written, 0.5)), 0);
    bench_row(s->b, "the same, in times of what a file that grows takes",
              lesser(most, CLAIM / bench_percentile(growing, grown, 0.5)) / rate, "x", 0, 1 / 0.8);
    free(growing);
    free(zeros);
}

void queue_bench_journal(queue_bench *s)
{
    bench_journal_bytes(s);
    bench_journal_commits(s);
}
