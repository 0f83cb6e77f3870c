/* What joined hosts ask of a run's supervisor (`dray join`), from several sessions, in any order.
 * Steps, whose first byte is a session (low 2 bits), and:
 *
 *  0 "join"   1 "pulse"   2 "leave"   3 another word   4 the session ends, and another one begins
 *
 * and, but for 4, u16 size and JSON, in which "=" stands for the job file of the run, and u16 size
 * and bytes.
 *
 * Each request is answered. What is refused gives no place and takes none, and a host that asks
 * again before it knows its places gets the same ones; a place belongs to one
 * session at a time; files are written in logs/ and trace/, of the session's own places; and when
 * all have gone, a host that keeps to the protocol gets every place, and brings its files home. */
#include "fuzz/fuzz.h"

#include "base/clock.h"
#include "base/json.h"
#include "control/channel.h"
#include "control/relay.h"
#include "control/reports.h"
#include "run/job/contract.h"
#include "run/job/settings.h"
#include "run/join/hosts.h"

#include <dirent.h>
#include <event2/event.h>
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>

enum {
    SESSIONS = 4,
    ROLES = 4,
    PLACES = 4,
    STEPS = 64,
    JOIN = 0,
    PULSE,
    LEAVE,
    OTHER,
    AGAIN,
    KINDS
};

static const char job_text[] = "steps: 2\n"
                               "listen: tcp:127.0.0.1:7001\n"
                               "roles:\n"
                               "- {name: engine, tasks: [rollout, eval], instances: 3, local: 1}\n"
                               "- {name: trainer, tasks: [old_log_prob, actor]}\n"
                               "- {name: grader, tasks: [reward], local: 0}\n"
                               "- {name: grader-desk, tasks: [driver, reference, advantage]}\n";
static const char *const words[] = {"join", "pulse", "leave", "give"};

typedef struct session {
    dray_context *context;
    dray__channel *channel;
    bool joined;
} session;

static struct world {
    struct event_base *base;
    dray__coordinator *coordinator;
    pthread_t thread;
    dray__job *job;
    char *text, *quoted, address[128];
    dray__folder folder;
    dray__reporter *reporter;
    dray__hosts *hosts;
    session sessions[SESSIONS];
    session *owners[ROLES][PLACES];
    json_int_t epochs[ROLES][PLACES]; /* the last that was given, and 1 */
} w;

/* ---- the run --------------------------------------------------------------------------------- */

static void *coordinate(void *user)
{
    (void)user;
    event_base_loop(w.base, EVLOOP_NO_EXIT_ON_EMPTY);
    return NULL;
}

static void start(void)
{
    char path[192], socket[96];
    const char *url;
    snprintf(path, sizeof path, "%s", fuzz_path("job.yaml"));
    fuzz_write(path, job_text, strlen(job_text));
    MUST(dray__job_load(path, NULL, 0, &w.job, NULL, NULL) == DRAY_OK);
    MUST(dray__settings_yaml(w.job, &w.text, NULL) == DRAY_OK);
    json_t *text = json_string(w.text);
    w.quoted = json_dumps(text, JSON_ENCODE_ANY);
    json_decref(text);
    MUST(w.quoted);
    snprintf(socket, sizeof socket, "%s", fuzz_path("socket"));
    snprintf(w.address, sizeof w.address, "unix:%s", socket);
    snprintf(w.folder.path, sizeof w.folder.path, "%s", fuzz_path("run"));
    snprintf(w.folder.id, sizeof w.folder.id, "fuzzed");
    w.folder.epoch = 1;
    MUST(mkdir(w.folder.path, 0700) == 0 && mkdir(fuzz_path("run/logs"), 0700) == 0 &&
         mkdir(fuzz_path("run/trace"), 0700) == 0);
    const dray__coordinator_options options = {.unix_path = socket};
    MUST((w.base = event_base_new()));
    MUST(dray__coordinator_new(w.base, &options, &w.coordinator, NULL) == DRAY_OK);
    MUST(dray__reports_add(w.coordinator, NULL) == DRAY_OK);
    MUST(dray__relay_add(w.coordinator, NULL) == DRAY_OK);
    MUST(pthread_create(&w.thread, NULL, coordinate, NULL) == 0);
    MUST(freopen("/dev/null", "w", stdout)); /* the view of the run */
    MUST(dray__reporter_start(&w.folder, w.job, w.address, true, &w.reporter, &url, NULL) ==
         DRAY_OK);
    const dray__hosts_options hosts = {.folder = &w.folder,
                                       .job = w.job,
                                       .text = w.text,
                                       .address = w.address,
                                       .listen = "127.0.0.1",
                                       .reporter = w.reporter};
    MUST(dray__hosts_start(&hosts, &w.hosts, NULL) == DRAY_OK);
}

static uint32_t joined_hosts(void)
{
    dray__hosts_sight sight;
    dray__hosts_look(w.hosts, &sight);
    MUST(strlen(sight.described) < sizeof sight.described &&
         strlen(sight.missing) < sizeof sight.missing);
    return sight.count;
}

/* ---- hosts ----------------------------------------------------------------------------------- */

static void begin(session *s)
{
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = w.address;
    options.name = "a host";
    options.role = "task";
    *s = (session){0};
    MUST(dray_open(&options, &s->context, NULL) == DRAY_OK);
    MUST(dray__channel_open(s->context, &s->channel, NULL) == DRAY_OK);
}

static void forget(const session *s)
{
    for (int r = 0; r < ROLES; r++)
        for (int i = 0; i < PLACES; i++)
            w.owners[r][i] = w.owners[r][i] == s ? NULL : w.owners[r][i];
}

/* The supervisor is told of its end by and by. */
static void end(session *s)
{
    uint32_t left = 0;
    for (int i = 0; i < SESSIONS; i++)
        left += &w.sessions[i] != s && w.sessions[i].joined;
    dray__channel_close(s->channel);
    dray_close(s->context);
    forget(s);
    s->joined = false;
    for (int64_t deadline = dray__deadline(60 * DRAY__SECOND); joined_hosts() != left; usleep(1000))
        MUST(dray__now() < deadline);
}

static json_t *ask(session *s, const char *what, const char *json, size_t json_size,
                   const void *bytes, size_t size)
{
    dray__arena texts = {0};
    dray__host_told told = {0};
    const dray__host_ask message = {
        .what = what, .json = json, .json_size = json_size, .bytes = bytes, .size = size};
    int rc =
        dray__ask(s->channel, DRAY__MSG_HOST_ASK, &dray__host_ask_fields, &message,
                  dray__deadline(60 * DRAY__SECOND), &texts, &dray__host_told_fields, &told, NULL);
    json_t *found = NULL;
    MUST(rc != DRAY_ETIMEDOUT && rc != DRAY_ECLOSED && rc != DRAY_ENOMEM);
    if (!rc)
        MUST(dray__json_parse(told.json, told.json_size, "an answer", &found, NULL) == DRAY_OK);
    dray__arena_free(&texts);
    return found;
}

/* A host that joins again, with the key that it had, takes the place of its last session. */
static void look_who_is_left(void)
{
    for (int i = 0; i < SESSIONS; i++) {
        json_t *told = w.sessions[i].joined ? ask(&w.sessions[i], "pulse", "{}", 2, NULL, 0) : NULL;
        if (!told)
            forget(&w.sessions[i]);
        w.sessions[i].joined = told != NULL;
        json_decref(told);
    }
}

/* With `again` they are those that it has. */
static void take_places(session *s, const json_t *told, bool again)
{
    size_t i;
    const json_t *place, *places = json_object_get(told, "places");
    MUST(json_array_size(places) > 0);
    json_array_foreach(places, i, place)
    {
        const char *name = dray__json_string(place, "role");
        uint32_t role = 0;
        while (name && role < w.job->role_count && strcmp(w.job->roles[role].name, name) != 0)
            role++;
        MUST(name && role < ROLES && role < w.job->role_count);
        json_int_t number = dray__json_integer(place, "number"),
                   epoch = dray__json_integer(place, "epoch");
        MUST(number >= w.job->roles[role].local && number < dray__role_places(&w.job->roles[role]));
        MUST(again ? w.owners[role][number] == s && epoch + 1 == w.epochs[role][number]
                   : !w.owners[role][number] && epoch + 1 > w.epochs[role][number]);
        w.owners[role][number] = s;
        w.epochs[role][number] = epoch + 1;
    }
}

static bool ours(const session *s, const char *file)
{
    for (uint32_t r = 0; r < w.job->role_count; r++)
        for (uint32_t i = 0; i < dray__role_places(&w.job->roles[r]); i++) {
            char label[DRAY__LABEL_BYTES];
            dray__role_label(&w.job->roles[r], i, label);
            if (w.owners[r][i] == s && strncmp(file, label, strlen(label)) == 0 &&
                file[strlen(label)] == '-')
                return true;
        }
    return strncmp(file, "host-", 5) == 0;
}

/* What was said of hosts is whole lines of JSON, which command no terminal. */
static void look_at_events(void)
{
    char *text = NULL;
    size_t size = 0;
    json_t *event = NULL;
    FILE *file = fopen(fuzz_path("run/events.jsonl"), "r");
    MUST(file);
    while (getline(&text, &size, file) > 0) {
        MUST(dray__json_parse(text, strlen(text), "an event", &event, NULL) == DRAY_OK);
        const char *message = dray__json_string(event, "message"),
                   *kind = dray__json_string(event, "event");
        MUST(kind && dray__utf8_plain(kind, strlen(kind)));
        MUST(!message || dray__utf8_plain(message, strlen(message)));
        json_decref(event);
    }
    free(text);
    fclose(file);
    MUST(truncate(fuzz_path("run/events.jsonl"), 0) == 0);
}

/* Removes what was written; s: who alone may have. */
static void look_at_files(const session *s)
{
    static const char *const folders[] = {"run/logs", "run/trace"};
    for (int f = 0; f < 2; f++) {
        char path[192];
        snprintf(path, sizeof path, "%s", fuzz_path(folders[f]));
        DIR *listing = opendir(path);
        MUST(listing);
        for (struct dirent *entry; (entry = readdir(listing));)
            if (entry->d_name[0] != '.' || strlen(entry->d_name) > 2) {
                MUST(ours(s, entry->d_name));
                MUST(unlinkat(dirfd(listing), entry->d_name, 0) == 0);
            }
        closedir(listing);
    }
    MUST(access(fuzz_path("run/job.yaml"), F_OK) != 0); /* what seeds try to write elsewhere */
    MUST(access(fuzz_path("planted"), F_OK) != 0 && access(fuzz_path("run/planted"), F_OK) != 0);
}

static void step(session *s, int kind, const char *json, size_t json_size, const void *bytes,
                 size_t size)
{
    bool had = s->joined, again = had && kind == JOIN;
    uint32_t joined = 0;
    json_t *told = ask(s, words[kind], json, json_size, bytes, size);
    MUST(!told || (kind != OTHER && (again || had == (kind != JOIN))));
    if (told && kind == LEAVE) {
        forget(s);
        s->joined = false;
    }
    if (kind == JOIN)
        look_who_is_left();
    if (told && kind == JOIN) {
        s->joined = true;
        take_places(s, told, again);
    }
    for (int i = 0; i < SESSIONS; i++)
        joined += w.sessions[i].joined;
    MUST(joined_hosts() == joined);
    look_at_files(s);
    json_decref(told);
}

static int count_events(const char *with)
{
    char *text = NULL;
    size_t size = 0;
    int count = 0;
    FILE *file = fopen(fuzz_path("run/events.jsonl"), "r");
    MUST(file);
    while (getline(&text, &size, file) > 0)
        count += strstr(text, with) != NULL;
    free(text);
    fclose(file);
    return count;
}

/* Every place is free again, for a host that keeps to the protocol. */
static void keep_to_it(void)
{
    static const char others[] = "{\"files\":[{\"name\":\"logs/grader-desk-0.log\",\"at\":0,"
                                 "\"size\":5}]}";
    static const char pulse[] = "{\"busy\":true,\"say\":[{\"event\":\"good\",\"text\":"
                                "\"told once\",\"number\":1}],\"files\":[{\"name\":\"logs/"
                                "grader-0.log\",\"at\":0,\"size\":5}]}";
    char *join, back[8] = "";
    session *s = &w.sessions[0];
    begin(s);
    MUST(asprintf(&join,
                  "{\"format\":%d,\"text\":%s,\"name\":\"good\",\"key\":\"good\",\"address\":\"127."
                  "0.0.1\","
                  "\"port\":1,\"roles\":{\"engine\":2,\"grader\":1}}",
                  DRAY__JOIN_FORMAT, w.quoted) > 0);
    json_t *told = ask(s, "join", join, strlen(join), NULL, 0);
    MUST(told && json_array_size(json_object_get(told, "places")) == 3);
    s->joined = true;
    take_places(s, told, false);
    json_decref(told);
    free(join);
    for (int i = 0; i < 2; i++) { /* the second time as if the answer had been lost */
        MUST((told = ask(s, "pulse", pulse, strlen(pulse), "hello", 5)));
        json_decref(told);
    }
    MUST(count_events("host good: told once") == 1);
    MUST((told = ask(s, "pulse", others, strlen(others), "hello", 5)));
    json_decref(told);
    MUST(access(fuzz_path("run/logs/grader-desk-0.log"), F_OK) != 0);
    FILE *file = fopen(fuzz_path("run/logs/grader-0.log"), "r");
    MUST(file && fread(back, 1, sizeof back, file) == 5 && strcmp(back, "hello") == 0);
    fclose(file);
    look_at_files(s);
    MUST((told = ask(s, "leave", "{}", 2, NULL, 0)));
    json_decref(told);
    s->joined = false;
    end(s);
}

/* ---- inputs ---------------------------------------------------------------------------------- */

/* The JSON with the run's job file; malloc'ed. */
static char *filled(const char *json, size_t *size)
{
    static const char mark[] = "\"=\"";
    const char *at = memmem(json, *size, mark, strlen(mark));
    size_t quoted = strlen(w.quoted), before = at ? (size_t)(at - json) : *size;
    char *made = malloc(*size + quoted + 1);
    MUST(made);
    memcpy(made, json, before);
    if (at) {
        memcpy(made + before, w.quoted, quoted);
        memcpy(made + before + quoted, at + strlen(mark), *size - before - strlen(mark));
        *size += quoted - strlen(mark);
    }
    return made;
}

/* As many bytes as the input says, or has. */
static const char *part(dray__reader *r, size_t *size)
{
    *size = dray__get_u16(r);
    *size = *size < r->size - r->at ? *size : r->size - r->at;
    return r->failed ? "" : dray__get_bytes(r, *size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    dray__reader r = dray__reader_of(data, size);
    if (!w.hosts)
        start();
    for (int i = 0; i < SESSIONS; i++)
        begin(&w.sessions[i]);
    for (int i = 0; i < STEPS && r.at < size; i++) {
        uint8_t what = dray__get_u8(&r);
        session *s = &w.sessions[what % SESSIONS];
        int kind = what / SESSIONS % KINDS;
        size_t json_size, bytes_size;
        if (kind == AGAIN) {
            end(s);
            begin(s);
            continue;
        }
        const char *given = part(&r, &json_size);
        char *json = filled(given, &json_size);
        const char *bytes = part(&r, &bytes_size);
        step(s, kind, json, json_size, bytes, bytes_size);
        free(json);
    }
    for (int i = 0; i < SESSIONS; i++)
        end(&w.sessions[i]);
    keep_to_it();
    look_at_events();
    return 0;
}

/* ---- seeds ----------------------------------------------------------------------------------- */

static void put_step(dray__writer *out, int of, int kind, const char *json, const char *bytes)
{
    dray__put_u8(out, (uint8_t)(kind * SESSIONS + of));
    if (kind == AGAIN)
        return;
    dray__put_u16(out, (uint16_t)strlen(json));
    dray__put_bytes(out, json, strlen(json));
    dray__put_u16(out, (uint16_t)strlen(bytes));
    dray__put_bytes(out, bytes, strlen(bytes));
}

#define WISH(name, key, roles)                                                                     \
    "{\"format\":1,\"text\":\"=\",\"name\":\"" name "\",\"key\":\"" key                            \
    "\",\"address\":\"10.0.0.1\",\"port\":9,\"roles\":" roles "}"
#define FILES(name, at, size)                                                                      \
    "{\"busy\":true,\"say\":[{\"event\":\"restart\",\"text\":\"engine.1 died\"}],\"files\":["      \
    "{\"name\":\"" name "\",\"at\":" at ",\"size\":" size "}]}"
#define LONG                                                                                       \
    "\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9"

void fuzz_seeds(fuzz_put put, void *user)
{
    static const struct {
        int session, kind;
        const char *json, *bytes;
    } stories[][8] = {
        {{0, JOIN, WISH("one", "a", "{\"engine\":1}"), ""},
         {1, JOIN, WISH("two", "b", "{\"engine\":1,\"grader\":1}"), ""},
         {0, PULSE, FILES("logs/engine.1-0.log", "0", "3"), "abc"},
         {1, PULSE, FILES("trace/grader-0-1.spans", "4096", "3"), "abc"},
         {2, JOIN, WISH("late", "c", "{\"engine\":1}"), ""},
         {1, LEAVE, "{}", ""},
         {2, JOIN, WISH("late", "c", "{\"engine\":1}"), ""},
         {0, AGAIN, "", ""}},
        {{0, JOIN, WISH("one", "a", "{\"engine\":2}"), ""},
         {1, JOIN, WISH("one", "a", "{\"engine\":2}"), ""}, /* the same host again */
         {0, PULSE, "{\"failed\":\"no room\"}", ""},
         {1, PULSE, "{\"failed\":\"no room\"}", ""},
         {1, PULSE, FILES("logs/../planted", "0", "1"), "x"},
         {1, PULSE, FILES("planted", "0", "1"), "x"},
         {1, PULSE, FILES("logs/trainer-0.log", "0", "1"), "x"},
         {1, OTHER, "{}", ""}},
        {{0, JOIN, WISH(LONG LONG LONG "x" LONG, LONG LONG, "{\"engine\":1}"), ""},
         {0, PULSE, FILES("logs/host-one.log", "0", "1"), "x"},
         {1, JOIN, WISH("x" LONG LONG LONG LONG, "x" LONG LONG, "{\"grader\":1}"), ""},
         {1, PULSE, FILES("logs/grader-0.log", "99", "1"), "x"}},
        {{0, JOIN, WISH("one", "a", "{\"trainer\":1}"), ""}, /* none of them may */
         {0, JOIN, WISH("one", "a", "{\"critic\":1}"), ""},
         {0, JOIN, WISH("one", "a", "{\"engine\":3}"), ""},
         {0, JOIN, WISH("one", "a", "{}"), ""},
         {0, JOIN, WISH("one", "a", "[]"), ""},
         {0, JOIN, "{\"format\":1,\"text\":\"steps: 3\\n\",\"roles\":{\"engine\":1}}", ""},
         {0, JOIN, "{\"format\":2,\"text\":\"=\",\"roles\":{\"engine\":1}}", ""},
         {0, JOIN,
          "{\"format\":1,\"id\":\"other\",\"epoch\":1,\"text\":\"=\",\"roles\":{\"engine\":1}}",
          ""}},
    };
    for (size_t i = 0; i < sizeof stories / sizeof stories[0]; i++) {
        dray__writer all = {0};
        for (int k = 0; k < 8 && stories[i][k].json; k++)
            put_step(&all, stories[i][k].session, stories[i][k].kind, stories[i][k].json,
                     stories[i][k].bytes);
        put(user, all.data, all.size);
        dray__writer_free(&all);
    }
}
