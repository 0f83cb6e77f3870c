/* Measures the share of a core that a coordinator with 1,000 joined hosts takes. Each host has two
 * sessions. That of `dray join` asks for the time and sends a sign of life once a second. That of
 * an engine claims a row, commits it and posts a report once a second. All sessions use TLS and
 * belong to this process. The coordinator is a process of its own, and the supervisor answers in
 * this one. The limit is half a core. */
#include "base/clock.h"
#include "base/error.h"
#include "base/json.h"
#include "bench.h"
#include "control/channel.h"
#include "control/relay.h"
#include "control/token.h"
#include "run/supervisor/coordinator.h"

#include <dray/queue.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HOSTS = 1000, THREADS = 8, SECONDS = 10, ROWS = 32768 };

typedef struct member {
    dray_context *context, *engine;
    dray__channel *channel;
    dray_queue *queue;
} member;

static struct {
    char folder[64], socket[128], tcp[128], master[96], task[96];
    pid_t coordinator;
    member hosts[HOSTS];
    atomic_int failed;
    atomic_ulong turns, late_ns;
    atomic_bool over;
    uint32_t count;
} w;

static void must(int rc, const dray_error *error, const char *what)
{
    if (!rc)
        return;
    fprintf(stderr, "bench_joined: %s: %s\n", what, error->message);
    if (w.coordinator > 0)
        kill(w.coordinator, SIGKILL);
    exit(1);
}

/* ---- the coordinator ------------------------------------------------------------------------- */

static void ready(void *user, const char *unix_address, const char *tcp, const char *metrics)
{
    (void)unix_address, (void)metrics;
    FILE *to = user;
    fprintf(to, "%s\n", tcp);
    fclose(to);
}

static void start_coordinator(void)
{
    int ends[2];
    strcpy(w.folder, "/tmp/dray-bench-XXXXXX");
    if (!mkdtemp(w.folder) || pipe(ends))
        exit(1);
    snprintf(w.socket, sizeof w.socket, "%s/s", w.folder);
    snprintf(w.master, sizeof w.master, "%s/master", w.folder);
    snprintf(w.task, sizeof w.task, "%s/task", w.folder);
    w.coordinator = fork();
    if (w.coordinator == 0) {
        char keeper[160];
        dray_error error;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        snprintf(keeper, sizeof keeper, "%s/k", w.folder);
        const dray__serve_options options = {.unix_path = w.socket,
                                             .tcp_address = "127.0.0.1:0",
                                             .token_path = w.master,
                                             .keeper_path = keeper,
                                             .limits = "sessions=8192",
                                             .hosts = true,
                                             .start_keeper = true,
                                             .ready = ready,
                                             .user = fdopen(ends[1], "w")};
        int rc = dray__serve(&options, &error);
        if (rc)
            fprintf(stderr, "bench_joined: coordinator: %s\n", error.message);
        _exit(rc ? 1 : 0);
    }
    close(ends[1]);
    FILE *from = fdopen(ends[0], "r");
    dray_error error;
    if (!from || !fgets(w.tcp, sizeof w.tcp, from))
        exit(1);
    fclose(from);
    w.tcp[strcspn(w.tcp, "\n")] = 0;
    must(dray__make_token(w.master, "task", w.task, NULL, &error), &error, "token");
}

/* Returns the CPU seconds of a process: proc(5), fields 14 and 15. */
static double cpu_of(pid_t pid)
{
    char path[64], line[1024];
    unsigned long long user = 0, kernel = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "re");
    const char *behind = file && fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    if (behind)
        sscanf(behind + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &user,
               &kernel);
    if (file)
        fclose(file);
    return (double)(user + kernel) / (double)sysconf(_SC_CLK_TCK);
}

/* ---- the supervisor -------------------------------------------------------------------------- */

static void *supervise(void *user)
{
    dray_context *context;
    dray__channel *channel;
    dray_error error;
    dray_options options = DRAY_OPTIONS_INIT;
    static dray__host_answer answers[256];
    static const char told[] = "{\"progress\":1,\"ended\":false,\"over\":false,\"why\":\"\"}";
    uint32_t count = 0;
    options.address = user;
    must(dray_open(&options, &context, &error), &error, "supervisor");
    must(dray__channel_open(context, &channel, &error), &error, "supervisor");
    while (!atomic_load(&w.over) || count) {
        dray__arena texts = {0};
        dray__host_asks asks = {0};
        const dray__host_next message = {100 * DRAY__MILLISECOND, answers, count};
        must(dray__ask(channel, DRAY__MSG_HOST_NEXT, &dray__host_next_fields, &message,
                       dray__deadline(60 * DRAY__SECOND), &texts, &dray__host_asks_fields, &asks,
                       &error),
             &error, "HOST_NEXT");
        count = 0;
        for (uint32_t i = 0; i < asks.count; i++)
            if (asks.items[i].number)
                answers[count++] = (dray__host_answer){.number = asks.items[i].number,
                                                       .message = "",
                                                       .json = told,
                                                       .json_size = sizeof told - 1};
        dray__arena_free(&texts);
    }
    dray__channel_close(channel);
    dray_close(context);
    return NULL;
}

/* ---- hosts ----------------------------------------------------------------------------------- */

static void open_host(member *m)
{
    dray_error error;
    dray_options options = DRAY_OPTIONS_INIT;
    dray_queue_options queue = DRAY_QUEUE_OPTIONS_INIT;
    options.address = w.tcp;
    options.timeout_ns = 60 * DRAY__SECOND;
    must(dray_open(&options, &m->context, &error), &error, "host");
    must(dray__channel_open(m->context, &m->channel, &error), &error, "host");
    must(dray_open(&options, &m->engine, &error), &error, "engine");
    must(dray_queue_open(m->engine, "samples", &queue, &m->queue, &error), &error, "queue");
}

static void second_of(const member *m)
{
    static const dray__field none = {.name = NULL};
    static const dray__fields nothing = {"HOST_CLOCK", 0, &none};
    static const char said[] =
        "{\"say\":[],\"busy\":true,\"left\":false,\"files\":[{\"name\":\"trace/engine-0-1.spans\","
        "\"at\":0,\"size\":8192},{\"name\":\"trace/engine-0-1.spans\",\"at\":8192,\"size\":2048}]}";
    static const uint8_t bytes[8192 + 2048]; /* the head of a file of spans, and some spans */
    uint64_t now;
    dray_error error;
    dray_batch *batch;
    dray__arena texts = {0};
    dray__host_told told;
    const dray__host_ask ask = {"pulse", said, bytes, sizeof said - 1, sizeof bytes};
    must(dray__ask(m->channel, DRAY__MSG_HOST_CLOCK, &nothing, NULL,
                   dray__deadline(60 * DRAY__SECOND), NULL, &dray__u64_fields, &now, &error),
         &error, "HOST_CLOCK");
    must(dray__ask(m->channel, DRAY__MSG_HOST_ASK, &dray__host_ask_fields, &ask,
                   dray__deadline(60 * DRAY__SECOND), &texts, &dray__host_told_fields, &told,
                   &error),
         &error, "HOST_ASK");
    dray__arena_free(&texts);
    dray_claim_options claim = DRAY_CLAIM_OPTIONS_INIT;
    claim.task = "rollout";
    claim.count = 1;
    must(dray_queue_claim(m->queue, &claim, &batch, &error), &error, "claim");
    must(dray_batch_commit(batch, &error), &error, "commit");
    dray_batch_free(batch);
    must(
        dray_report_post(m->engine, "engine_update", "{\"role\":\"engine\",\"version\":1}", &error),
        &error, "report");
}

/* Opens every THREADS-th host, and then does a second's work of each of them in every second. */
static void *drive(void *user)
{
    uint32_t first = *(const uint32_t *)user;
    for (uint32_t i = first; i < HOSTS; i += THREADS)
        open_host(&w.hosts[i]);
    atomic_fetch_add(&w.turns, 1);
    /* All hosts are open, and the measurement begins. */
    while (atomic_load(&w.turns) < THREADS + 1)
        usleep(1000);
    for (int second = 0; second < SECONDS; second++) {
        int64_t end = dray__deadline(DRAY__SECOND);
        for (uint32_t i = first; i < HOSTS; i += THREADS)
            second_of(&w.hosts[i]);
        int64_t left = end - dray__now();
        if (left > 0)
            usleep((useconds_t)(left / 1000));
        else
            atomic_fetch_add(&w.late_ns, (unsigned long)-left);
    }
    return NULL;
}

static void fill_queue(dray_queue **queue, dray_context **context)
{
    dray_error error;
    dray_options options = DRAY_OPTIONS_INIT;
    char address[160];
    snprintf(address, sizeof address, "unix:%s", w.socket);
    options.address = address;
    must(dray_open(&options, context, &error), &error, "queue");
    const dray_queue_task tasks[] = {{.name = "rollout"}};
    dray_queue_options of = DRAY_QUEUE_OPTIONS_INIT;
    of.tasks = tasks;
    of.task_count = 1;
    must(dray_queue_open(*context, "samples", &of, queue, &error), &error, "queue");
    dray_insert_options insert = DRAY_INSERT_OPTIONS_INIT;
    insert.partition = "step-1";
    insert.rows = ROWS;
    must(dray_queue_insert(*queue, &insert, NULL, &error), &error, "insert");
}

int main(int argc, char **argv)
{
    bench *b = bench_open(argc, argv, "joined");
    pthread_t threads[THREADS], supervisor;
    uint32_t firsts[THREADS];
    char address[160];
    dray_queue *queue;
    dray_context *context;
    start_coordinator();
    setenv("DRAY_TOKEN_FILE", w.task, 1);
    snprintf(address, sizeof address, "unix:%s", w.socket);
    fill_queue(&queue, &context);
    pthread_create(&supervisor, NULL, supervise, address);
    for (uint32_t i = 0; i < THREADS; i++) {
        firsts[i] = i;
        pthread_create(&threads[i], NULL, drive, &firsts[i]);
    }
    while (atomic_load(&w.turns) < THREADS)
        usleep(1000);
    double cpu = cpu_of(w.coordinator);
    int64_t begin = dray__now();
    atomic_fetch_add(&w.turns, 1);
    for (uint32_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    double seconds = (double)(dray__now() - begin) / (double)DRAY__SECOND;
    cpu = cpu_of(w.coordinator) - cpu;
    atomic_store(&w.over, true);
    pthread_join(supervisor, NULL);
    double rate = (double)HOSTS * SECONDS / seconds;
    bench_row(b, "hosts, a second's work of each in a second", rate, "1/s", HOSTS, 0.9);
    /* This is the share at the real rate of 1,000 hosts, whatever rate this machine reached. */
    bench_row(b, "coordinator with 1,000 hosts, cores", cpu / seconds * HOSTS / rate, "cores", 0.5,
              1);
    kill(w.coordinator, SIGKILL);
    waitpid(w.coordinator, NULL, 0);
    return bench_close(b);
}
