/* Tests that flushed spans survive kill -9, that full rings count the spans that they drop, and
 * that damaged files do not affect others. (test_merge.py reads the merged file as JSON.) */
#include "base/hash.h"
#include "seed.h"
#include "suite.h"
#include "trace/spans.h"

#include <dray/trace.h>
#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[128];

static char *path_of(const char *name)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

FIXTURE(make_folder)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%.64s/dray-test-XXXXXX", tmp ? tmp : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

FIXTURE(remove_folder)
{
    char command[256];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

/* Spans that can be read from a file, and whether each is what the tests write: step i, begin i. */
static uint64_t count_spans(const char *path, uint64_t *lost)
{
    dray__spans *spans;
    dray__span span;
    uint64_t count = 0, wrong = 0;
    assert_int_equal(dray__spans_open(path, &spans, NULL), DRAY_OK);
    int status;
    while ((status = dray__spans_next(spans, &span, NULL)) == DRAY_OK) {
        wrong += span.begin_ns != span.step || span.end_ns < span.begin_ns;
        count++;
    }
    assert_int_equal(status, DRAY_EEND);
    assert_int_equal(wrong, 0);
    if (lost)
        *lost = dray__spans_lost(spans);
    dray__spans_close(spans);
    return count;
}

TEST(nothing_is_recorded_when_off)
{
    dray_trace_span(DRAY_SPAN_BUSY, "off", 1, 2, 1);
    assert_int_equal(dray_trace_flush(NULL), DRAY_OK);
    assert_int_equal(dray_trace_open(path_of("off.spans"), "off", NULL), DRAY_OK);
    assert_int_equal(dray_trace_flush(NULL), DRAY_OK);
    assert_int_equal(dray_trace_open(NULL, NULL, NULL), DRAY_OK);
    dray_trace_span(DRAY_SPAN_BUSY, "off", 1, 2, 1);
    assert_int_equal(dray_trace_flush(NULL), DRAY_OK);
    assert_int_equal(count_spans(path_of("off.spans"), NULL), 0);
    dray_error error;
    assert_int_equal(dray_trace_open("/nowhere/at/all", "x", &error), DRAY_ESYS);
}

enum { THREADS = 4, EACH = 20000 };

static void *record(void *user)
{
    static const char *const names[] = {"forward", "two\nlines", "größe", "\xff bad"};
    (void)user;
    for (int i = 0; i < EACH; i++)
        dray_trace_span((dray_span_kind)(i % 3), names[i % 4], i, i + 5, i);
    return NULL;
}

TEST(threads_record_while_others_flush)
{
    assert_int_equal(dray_trace_open(path_of("threads.spans"), "threads", NULL), DRAY_OK);
    for (int round = 0; round < 3; round++) {
        pthread_t threads[THREADS];
        for (int i = 0; i < THREADS; i++)
            assert_int_equal(pthread_create(&threads[i], NULL, record, NULL), 0);
        for (int i = 0; i < 50; i++)
            assert_int_equal(dray_trace_flush(NULL), DRAY_OK);
        for (int i = 0; i < THREADS; i++)
            pthread_join(threads[i], NULL);
    }
    assert_int_equal(dray_trace_open(NULL, NULL, NULL), DRAY_OK);
    uint64_t lost;
    uint64_t count = count_spans(path_of("threads.spans"), &lost);
    assert_int_equal(count + lost, 3 * THREADS * EACH);
    assert_int_equal(lost, 0); /* a thread's spans fit its ring */
}

static void *record_one(void *user)
{
    const int *number = user;
    char partition[32];
    snprintf(partition, sizeof partition, "step-%06d", *number);
    dray_trace_enter(DRAY_SPAN_BUSY, "train", *number);
    dray_trace_samples(partition, "actor", 1);
    dray_trace_leave();
    return NULL;
}

/* As many threads, one after the other, and as many partitions, as a long run has: each span has
 * its partition's name, and the threads between two flushes are one line. */
TEST(names_and_threads_come_and_go)
{
    enum { MANY = 3000 };
    assert_int_equal(dray_trace_open(path_of("many.spans"), "many", NULL), DRAY_OK);
    for (int i = 0; i < MANY; i++) {
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, record_one, &i), 0);
        pthread_join(thread, NULL);
        if (i % 500 == 499) {
            record_one(&(int){i});
            assert_int_equal(dray_trace_flush(NULL), DRAY_OK);
        }
    }
    assert_int_equal(dray_trace_open(NULL, NULL, NULL), DRAY_OK);
    dray__spans *spans;
    dray__span span;
    char wanted[32];
    int count = 0;
    assert_int_equal(dray__spans_open(path_of("many.spans"), &spans, NULL), DRAY_OK);
    while (dray__spans_next(spans, &span, NULL) == DRAY_OK) {
        snprintf(wanted, sizeof wanted, "step-%06d", (int)span.step);
        assert_string_equal(span.partition, wanted);
        assert_string_equal(span.task, "actor");
        count++;
    }
    assert_in_range(dray__spans_thread_count(spans), 1, 1 + MANY / 500);
    dray__spans_close(spans);
    assert_int_equal(count, MANY + MANY / 500);
}

TEST(full_rings_count_what_they_drop)
{
    assert_int_equal(dray_trace_open(path_of("full.spans"), "full", NULL), DRAY_OK);
    for (int i = 0; i < 100000; i++)
        dray_trace_span(DRAY_SPAN_WAIT, "wait", i, i, i);
    assert_int_equal(dray_trace_open(NULL, NULL, NULL), DRAY_OK);
    uint64_t lost;
    uint64_t count = count_spans(path_of("full.spans"), &lost);
    assert_int_equal(count + lost, 100000);
    assert_int_equal(count, 32768);
}

TEST(what_was_flushed_survives_a_kill)
{
    assert_int_equal(dray_trace_open(path_of("parent.spans"), "parent", NULL), DRAY_OK);
    dray_trace_span(DRAY_SPAN_BUSY, "before", 1, 2, 1);
    pid_t child = fork();
    if (child == 0) {
        dray_trace_span(DRAY_SPAN_BUSY, "not mine", 1, 2, 1); /* off in a child */
        if (dray_trace_flush(NULL) || dray_trace_open(path_of("killed.spans"), "killed", NULL))
            _exit(1);
        for (int i = 0; i < 1000; i++)
            dray_trace_span(DRAY_SPAN_TRANSFER, "pull", i, i + 1, i);
        if (dray_trace_flush(NULL))
            _exit(1);
        dray_trace_span(DRAY_SPAN_TRANSFER, "lost", 0, 0, 0);
        raise(SIGKILL);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    assert_int_equal(dray_trace_open(NULL, NULL, NULL), DRAY_OK);
    assert_int_equal(count_spans(path_of("killed.spans"), NULL), 1000);
    assert_int_equal(count_spans(path_of("parent.spans"), NULL), 1);
}

/* The content of a file of at most 1023 bytes; "" where there is none. */
static const char *text_of(const char *path)
{
    static char text[1024];
    FILE *file = fopen(path, "r");
    size_t size = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file)
        fclose(file);
    text[size] = 0;
    return text;
}

TEST(responses_lie_beside_the_spans)
{
    dray_trace_response(1, 0, 1, 1, 1, 2); /* nobody records */
    assert_int_equal(dray_trace_open(path_of("made.spans"), "made", NULL), DRAY_OK);
    dray_trace_response(3, 14, 5, 60, 100, 250);
    dray_trace_response(3, 15, 5, 0, 100, 250);  /* without tokens */
    dray_trace_response(3, 15, 5, 60, 100, 100); /* without time */
    dray_trace_response(-1, 15, 5, 60, 100, 200);
    dray_trace_response(3, 15, 5, 60, -100, 200);
    dray_trace_response(3, 15, 5, (uint64_t)1 << 32, 100, 200);
    dray_trace_response(3, 15, (uint64_t)1 << 32, 60, 100, 200);
    dray_trace_response((int64_t)1 << 32, 15, 5, 60, 100, 200);
    assert_int_equal(access(path_of("made.lengths"), F_OK), -1);
    pid_t child = fork();
    if (child == 0) { /* records nothing, nor what its parent has not flushed */
        dray_trace_response(9, 9, 9, 9, 9, 10);
        _exit(dray_trace_flush(NULL) || dray_trace_open(path_of("child.spans"), "child", NULL) ||
              dray_trace_flush(NULL));
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_int_equal(dray_trace_flush(NULL), DRAY_OK);
    dray_trace_response(4, 0, 7, 8, 300, INT64_MAX);
    assert_int_equal(dray_trace_open(NULL, NULL, NULL), DRAY_OK);
    assert_string_equal(text_of(path_of("made.lengths")),
                        "3 14 5 60 100 250\n4 0 7 8 300 9223372036854775807\n");
    assert_string_equal(text_of(path_of("child.lengths")), "");
    assert_int_equal(dray_trace_open(path_of("made.spans"), "again", NULL), DRAY_OK);
    assert_int_equal(access(path_of("made.lengths"), F_OK), -1); /* an earlier process's */
    assert_int_equal(mkdir(path_of("made.lengths"), 0700), 0);
    dray_trace_response(1, 0, 1, 1, 1, 2);
    assert_int_equal(dray_trace_flush(NULL), DRAY_OK); /* the log says that there are no more */
    assert_int_equal(rmdir(path_of("made.lengths")), 0);
    dray_trace_response(1, 0, 1, 1, 1, 2);
    assert_int_equal(dray_trace_flush(NULL), DRAY_OK);
    assert_int_equal(access(path_of("made.lengths"), F_OK), -1);
    assert_int_equal(dray_trace_open(NULL, NULL, NULL), DRAY_OK);
}

TEST(truncations_and_flips_lose_only_what_follows)
{
    assert_int_equal(dray_trace_open(path_of("whole.spans"), "whole", NULL), DRAY_OK);
    for (int i = 0; i < 12; i++) {
        dray_trace_span(DRAY_SPAN_BUSY, i % 2 ? "odd" : "even", i, i, i);
        assert_int_equal(dray_trace_flush(NULL), DRAY_OK);
    }
    assert_int_equal(dray_trace_open(NULL, NULL, NULL), DRAY_OK);
    static uint8_t data[2 * DRAY__SPANS_HEAD], flipped[sizeof data];
    int fd = open(path_of("whole.spans"), O_RDONLY);
    ssize_t size = read(fd, data, sizeof data);
    close(fd);
    assert_true(size > DRAY__SPANS_HEAD + 500 && size < (ssize_t)sizeof data);
    uint64_t last = 0;
    for (ssize_t cut = 1; cut <= size; cut += cut == 64 ? DRAY__SPANS_HEAD - 128 : 1) {
        unlink(path_of("cut.spans")); /* some file systems sync what is truncated and rewritten */
        fd = open(path_of("cut.spans"), O_WRONLY | O_CREAT | O_EXCL, 0600);
        assert_int_equal(write(fd, data, (size_t)cut), cut);
        close(fd);
        dray__spans *spans;
        if (dray__spans_open(path_of("cut.spans"), &spans, NULL) != DRAY_OK) {
            assert_true(cut < DRAY__SPANS_HEAD);
            continue;
        }
        dray__spans_close(spans);
        uint64_t count = count_spans(path_of("cut.spans"), NULL);
        assert_true(count == last || count == last + 1);
        last = count;
    }
    assert_int_equal(last, 12);
    for (ssize_t at = 0; at < size; at += at == 63 ? DRAY__SPANS_HEAD - 63 : 1) {
        memcpy(flipped, data, (size_t)size);
        flipped[at] ^= (uint8_t)(1 << (at % 8));
        unlink(path_of("cut.spans")); /* some file systems sync what is truncated and rewritten */
        fd = open(path_of("cut.spans"), O_WRONLY | O_CREAT | O_EXCL, 0600);
        assert_int_equal(write(fd, flipped, (size_t)size), size);
        close(fd);
        dray__spans *spans;
        if (dray__spans_open(path_of("cut.spans"), &spans, NULL) != DRAY_OK)
            continue;
        dray__spans_close(spans);
        assert_true(at < DRAY__SPANS_HEAD || count_spans(path_of("cut.spans"), NULL) < 12);
    }
    unlink(path_of("cut.spans"));
}

/* Of each number in a span's record the largest that can be, and one more; the sum is right. */
TEST(numbers_of_a_span)
{
    static const struct {
        size_t at; /* in the record: u8 kind, cause, u32 name, thread, 3 u64, 2 u32, 4 u64 */
        uint32_t most;
    } numbers[] = {{2, 0}, {6, 0}, {34, 1}, {38, 1}};
    (void)state;
    assert_int_equal(dray_trace_open(path_of("one.spans"), "one", NULL), DRAY_OK);
    dray_trace_span(DRAY_SPAN_BUSY, "name", 1, 2, 3);
    assert_int_equal(dray_trace_open(NULL, NULL, NULL), DRAY_OK);
    static uint8_t data[DRAY__SPANS_HEAD + 512], changed[sizeof data];
    int fd = open(path_of("one.spans"), O_RDWR);
    ssize_t size = read(fd, data, sizeof data);
    uint32_t length;
    assert_true(size > DRAY__SPANS_HEAD && size < (ssize_t)sizeof data);
    size_t chunk = DRAY__SPANS_HEAD, body = chunk + 16;
    memcpy(&length, data + chunk + 4, sizeof length);
    assert_int_equal(body + le32toh(length), size);
    for (size_t i = 0; i < 2 * sizeof numbers / sizeof *numbers; i++) {
        uint32_t number = htole32(numbers[i / 2].most + i % 2);
        memcpy(changed, data, sizeof changed);
        memcpy(changed + size - DRAY__SPAN_BYTES + numbers[i / 2].at, &number, sizeof number);
        uint64_t sum = htole64(dray__hash(changed + body, (size_t)size - body));
        memcpy(changed + chunk + 8, &sum, sizeof sum);
        assert_int_equal(pwrite(fd, changed, (size_t)size, 0), size);
        dray__spans *spans;
        dray__span span;
        assert_int_equal(dray__spans_open(path_of("one.spans"), &spans, NULL), DRAY_OK);
        assert_int_equal(dray__spans_next(spans, &span, NULL), i % 2 ? DRAY_EFORMAT : DRAY_OK);
        dray__spans_close(spans);
    }
    close(fd);
    unlink(path_of("one.spans"));
}

/* ---- what a thread enters -------------------------------------------------------------------- */

static void spend_us(unsigned us)
{
    int64_t until = dray_trace_now() + 1000 * (int64_t)us;
    while (dray_trace_now() < until) {
    }
}

/* Reads the one thread of a file: each span begins where the one before ended. Their times by state
 * go to `states`; returns how many there are. */
static uint64_t read_thread(const char *path, int64_t states[DRAY__STATES], int64_t *cpu_ns)
{
    dray__spans *spans;
    dray__span span;
    uint64_t count = 0;
    int64_t until = 0;
    assert_int_equal(dray__spans_open(path, &spans, NULL), DRAY_OK);
    for (; dray__spans_next(spans, &span, NULL) == DRAY_OK; count++) {
        assert_true(!count || span.begin_ns == until);
        assert_true(span.cpu_ns < 0 || span.cpu_ns <= span.end_ns - span.begin_ns + 10000000);
        until = span.end_ns;
        states[dray__state_of(span.kind, span.cause)] += span.end_ns - span.begin_ns;
        *cpu_ns += span.cpu_ns > 0 ? span.cpu_ns : 0;
    }
    assert_int_equal(dray__spans_lost(spans), 0);
    dray__spans_close(spans);
    return count;
}

/* One step of a random walk up and down what is entered; returns the depth. */
static int walk(int depth)
{
    int what = rand() % 8;
    int64_t now = dray_trace_now();
    if (what < 3 && depth < 20)
        dray_trace_enter((dray_span_kind)(what == 0 ? DRAY_SPAN_TRANSFER : DRAY_SPAN_BUSY), "work",
                         what);
    else if (what < 4 && depth < 20)
        dray_trace_wait((dray_wait_cause)(rand() % DRAY__WAIT_CAUSES), "wait", -1);
    else if (what == 4)
        dray_trace_span(DRAY_SPAN_TRANSFER, "over", now - rand() % 20000, now - rand() % 5000, 1);
    else if (what > 4 && depth > 1)
        dray_trace_leave();
    else
        return depth;
    if (what < 4 && rand() % 4 == 0)
        dray_trace_queued();
    return what < 4 ? depth + 1 : what == 4 ? depth : depth - 1;
}

TEST(spans_that_are_entered_never_overlap)
{
    unsigned seed = (unsigned)test_seed();
    srand(seed);
    assert_int_equal(dray_trace_open(path_of("entered.spans"), "entered 0", NULL), DRAY_OK);
    dray_trace_leave(); /* nothing is entered */
    dray_trace_enter(DRAY_SPAN_BUSY, "all", -1);
    for (int i = 0, depth = 1; i < 10000; i++) {
        depth = walk(depth);
        if (i % 1000 == 999)
            assert_int_equal(dray_trace_flush(NULL), DRAY_OK);
    }
    for (int i = 0; i < 25; i++)
        dray_trace_leave();
    dray__accounted is;
    assert_true(dray__account_read(path_of("entered.spans"), INT64_MAX, &is));
    assert_string_equal(is.label, "entered 0");
    assert_int_equal(dray_trace_open(NULL, NULL, NULL), DRAY_OK);
    int64_t states[DRAY__STATES] = {0}, cpu_ns = 0;
    assert_true(read_thread(path_of("entered.spans"), states, &cpu_ns) > 1000);
    for (int i = 0; i < DRAY__STATES; i++)
        assert_int_equal(is.state_ns[i], states[i]);
    assert_true(cpu_ns > 0 && cpu_ns <= is.cpu_ns);
}

TEST(short_waits_belong_to_what_is_around_them)
{
    static const unsigned lengths[] = {0, 20, 2000};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        assert_int_equal(dray_trace_open(path_of("brief.spans"), "brief", NULL), DRAY_OK);
        dray_trace_enter(DRAY_SPAN_BUSY, "all", -1);
        spend_us(300);
        int64_t begin = dray_trace_now();
        dray_trace_wait_briefly(DRAY_CAUSE_RANKS, "wait", -1);
        spend_us(lengths[i]);
        dray_trace_leave();
        int64_t took = dray_trace_now() - begin;
        spend_us(300);
        dray_trace_leave();
        dray__accounted is;
        assert_true(dray__account_read(path_of("brief.spans"), INT64_MAX, &is));
        assert_int_equal(dray_trace_open(NULL, NULL, NULL), DRAY_OK);
        int64_t states[DRAY__STATES] = {0}, cpu_ns = 0,
                waited = is.state_ns[DRAY__STATE_WAIT + DRAY_CAUSE_RANKS];
        uint64_t count = read_thread(path_of("brief.spans"), states, &cpu_ns);
        assert_true(waited >= 1000 * (int64_t)lengths[i] && waited <= took);
        assert_true(took < 100000 ? count == 1 : count == 3 || lengths[i] < 100);
        assert_true(count == 1 || states[DRAY__STATE_WAIT + DRAY_CAUSE_RANKS] == waited);
    }
}

/* Piece and account alike; of what is no wait nothing changes. */
TEST(a_wait_says_at_its_end_what_it_was_for)
{
    const int said = DRAY__STATE_WAIT + DRAY_CAUSE_SAMPLES,
              found = DRAY__STATE_WAIT + DRAY_CAUSE_ADMISSION;
    dray_trace_waited_for(DRAY_CAUSE_ADMISSION); /* nothing is recorded */
    assert_int_equal(dray_trace_open(path_of("found.spans"), "found", NULL), DRAY_OK);
    dray_trace_enter(DRAY_SPAN_BUSY, "all", -1);
    spend_us(300);
    dray_trace_waited_for(DRAY_CAUSE_ADMISSION);
    dray_trace_wait(DRAY_CAUSE_SAMPLES, "wait", -1);
    spend_us(500);
    dray_trace_waited_for((dray_wait_cause)DRAY__WAIT_CAUSES); /* there is none of that number */
    dray_trace_waited_for(DRAY_CAUSE_ADMISSION);
    dray_trace_leave();
    dray_trace_leave();
    dray__accounted is;
    assert_true(dray__account_read(path_of("found.spans"), INT64_MAX, &is));
    assert_int_equal(dray_trace_open(NULL, NULL, NULL), DRAY_OK);
    int64_t states[DRAY__STATES] = {0}, cpu_ns = 0;
    assert_true(read_thread(path_of("found.spans"), states, &cpu_ns) >= 2);
    assert_true(states[found] >= 500000 && states[found] == is.state_ns[found]);
    assert_true(!states[said] && !is.state_ns[said]);
    assert_int_equal(states[DRAY__STATE_BUSY], is.state_ns[DRAY__STATE_BUSY]);
}

/* The second number of the thread's own file, as the kernel writes it. */
static int64_t queued_by_now(void)
{
    long long number = 0;
    FILE *file = fopen("/proc/thread-self/schedstat", "re");
    assert_true(file && fscanf(file, "%*d %lld", &number) == 1);
    fclose(file);
    return number;
}

/* Beside another process on the same core; before and after it is not looked at. */
TEST(time_without_a_core_is_told_where_it_is_asked_for)
{
    cpu_set_t all, one;
    CPU_ZERO(&one);
    CPU_SET((size_t)sched_getcpu(), &one);
    assert_int_equal(sched_getaffinity(0, sizeof all, &all), 0);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    pid_t other = fork();
    if (other == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) {
        }
    }
    assert_int_equal(dray_trace_open(path_of("queued.spans"), "queued", NULL), DRAY_OK);
    dray_trace_queued(); /* nothing is entered */
    dray_trace_enter(DRAY_SPAN_BUSY, "before", -1);
    spend_us(100);
    int64_t begun = queued_by_now();
    dray_trace_enter(DRAY_SPAN_TRANSFER, "looked at", -1);
    dray_trace_queued();
    int64_t first = queued_by_now();
    spend_us(30000);
    dray_trace_wait(DRAY_CAUSE_WEIGHTS, "within", -1);
    spend_us(30000);
    dray_trace_leave();
    int64_t last = queued_by_now();
    dray_trace_leave();
    int64_t over = queued_by_now();
    spend_us(100);
    dray_trace_leave();
    assert_int_equal(dray_trace_open(NULL, NULL, NULL), DRAY_OK);
    kill(other, SIGKILL);
    waitpid(other, NULL, 0);
    assert_int_equal(sched_setaffinity(0, sizeof all, &all), 0);
    dray__spans *spans;
    dray__span span;
    int64_t told = 0;
    uint32_t within = 0;
    assert_int_equal(dray__spans_open(path_of("queued.spans"), &spans, NULL), DRAY_OK);
    while (dray__spans_next(spans, &span, NULL) == DRAY_OK) {
        bool looked_at = strcmp(span.name, "before") != 0;
        assert_true(looked_at ? span.queued_ns >= 0 : span.queued_ns == -1);
        told += looked_at ? span.queued_ns : 0;
        within += strcmp(span.name, "within") == 0;
    }
    dray__spans_close(spans);
    assert_int_equal(within, 1);
    assert_true(last - first <= told && told <= over - begun);
}

TEST(an_account_outlives_its_process)
{
    int ready[2];
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (dray_trace_open(path_of("dead.spans"), "dead 0", NULL))
            _exit(1);
        dray_trace_enter(DRAY_SPAN_BUSY, "a name that is far too long for an account to have", 1);
        spend_us(1000);
        dray_trace_wait(DRAY_CAUSE_WEIGHTS, "wait", -1);
        if (write(ready[1], "x", 1) != 1)
            _exit(1);
        pause();
    }
    char byte;
    dray__accounted is, later;
    const int wait = DRAY__STATE_WAIT + DRAY_CAUSE_WEIGHTS;
    assert_int_equal(read(ready[0], &byte, 1), 1);
    int64_t now = dray_trace_now();
    assert_true(dray__account_read(path_of("dead.spans"), now, &is));
    assert_true(dray__account_read(path_of("dead.spans"), now + 5000, &later));
    assert_int_equal(later.state_ns[wait] - is.state_ns[wait], 5000);
    assert_int_equal(is.state_ns[DRAY__STATE_BUSY] + is.state_ns[wait], now - is.first_ns);
    assert_true(is.state_ns[DRAY__STATE_BUSY] >= 1000000 && is.named_count == 1);
    assert_int_equal(is.named[0].ns, is.state_ns[DRAY__STATE_BUSY]);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
    dray__account_end(path_of("dead.spans"), now);
    dray__account_end(path_of("dead.spans"), now + 1000); /* it was dead before */
    assert_true(dray__account_read(path_of("dead.spans"), INT64_MAX, &later));
    assert_int_equal(later.ended_ns, now);
    assert_memory_equal(later.state_ns, is.state_ns, sizeof is.state_ns);
    assert_false(dray__account_read(path_of("text.spans"), now, &is));
    close(ready[0]);
    close(ready[1]);
    unlink(path_of("dead.spans"));
}

TEST(damaged_files_hurt_no_others)
{
    FILE *out = fopen(path_of("zero.spans"), "w");
    fclose(out);
    out = fopen(path_of("text.spans"), "w");
    fputs("this is no file of spans, but it is long enough to look at", out);
    fclose(out);
    assert_int_equal(mkdir(path_of("folder.spans"), 0700), 0);
    char merged[256];
    snprintf(merged, sizeof merged, "%s", path_of("trace.json"));
    dray_error error;
    assert_int_equal(dray_trace_merge(folder, merged, &error), DRAY_OK);
    json_t *object = json_load_file(merged, 0, NULL);
    assert_non_null(object);
    json_t *other = json_object_get(object, "otherData");
    assert_int_equal(json_integer_value(json_object_get(other, "files_left_out")), 3);
    assert_true(json_array_size(json_object_get(object, "traceEvents")) > 1000);
    json_decref(object);
    assert_int_equal(dray_trace_merge("/nowhere", merged, &error), DRAY_ENOENT);
    assert_int_equal(dray_trace_merge(folder, "/nowhere/x", &error), DRAY_ESYS);
}

SUITE(make_folder, remove_folder)
