#include "run/join/hosts.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/thread.h"
#include "base/words.h"
#include "control/channel.h"
#include "control/relay.h"
#include "run/job/contract.h"
#include "run/join/files.h"
#include "run/paths.h"
#include "trace/account.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    NAME = 64,
    KEY = 40,
    ADDRESS = 64,
    SAID = 900, /* bytes of a host's text; with the host's name it must fit an event's message */
    EPOCHS_A_PLACE = 1000, /* start numbers of each host that gets a place */
    SLICE_MS = 500,
    SILENT_SECONDS = 5,
    ANSWERS = 256
};

typedef struct guest {
    struct guest *next;
    uint64_t member;
    char name[NAME], key[KEY], address[ADDRESS];
    int64_t heard_ns;
    json_int_t said; /* the number of the last event that it has told */
    bool silent;     /* its silence was reported */
    bool unkept;     /* files of its last pulse could not be written here */
    bool begun;      /* it knows its places */
    json_t *given;   /* them, as the answer to "join" has them */
} guest;

typedef struct place {
    guest *guest; /* NULL when the place is free, or this host's own */
    uint32_t taken;
    bool stale; /* its host is gone, but its processes may still have sessions */
} place;

typedef struct places { /* of a role */
    place *items;
    uint32_t count, local;
    char master[ADDRESS]; /* host of a spread role's rank 0; "" while there is none */
    uint16_t port;
    int64_t missing_ns;
} places;

struct dray__hosts {
    dray__hosts_options o;
    uint64_t hash; /* of the job */
    dray_context *context;
    dray__channel *channel;
    dray__worker worker; /* its lock protects the fields below */
    guest *guests;
    places *roles;
    dray_error failure;
    int64_t moved_ns;
    bool queue_ended, over;
    char why[DRAY_ERROR_MESSAGE_MAX];
};

/* ---- places ---------------------------------------------------------------------------------- */

static char *label_of(const dray__job_role *role, uint32_t number, char out[DRAY__LABEL_BYTES])
{
    return dray__role_label(role, role->spread ? 0 : number, out);
}

static uint32_t free_places(const places *p)
{
    uint32_t count = 0;
    for (uint32_t i = p->local; i < p->count; i++)
        count += !p->items[i].guest && !p->items[i].stale;
    return count;
}

/* "rollout.1, trainer rank 2". */
static char *describe_places(const dray__hosts *self, const guest *of, char *out, size_t capacity)
{
    char label[DRAY__LABEL_BYTES];
    out[0] = 0;
    for (uint32_t r = 0; r < self->o.job->role_count; r++) {
        const dray__job_role *role = &self->o.job->roles[r];
        for (uint32_t i = 0; i < self->roles[r].count; i++) {
            size_t used = strlen(out);
            if (self->roles[r].items[i].guest != of)
                continue;
            snprintf(out + used, capacity - used, "%s%s", used ? ", " : "",
                     label_of(role, i, label));
            used = strlen(out);
            if (role->spread)
                snprintf(out + used, capacity - used, " rank %u", i);
        }
    }
    return out;
}

/* Looks for missing places that a role needs: one of its instances, or all of its ranks. */
static void look_for_missing(dray__hosts *self, int64_t now)
{
    for (uint32_t r = 0; r < self->o.job->role_count; r++) {
        places *p = &self->roles[r];
        uint32_t free = free_places(p);
        bool missing = self->o.job->roles[r].spread ? free > 0 : free == p->count;
        p->missing_ns = !missing ? 0 : p->missing_ns ? p->missing_ns : now;
    }
}

/* Ends the accounts of a lost host's processes, which count as dead from now on. */
static void end_accounts(const dray__hosts *self, const char *label)
{
    char folder[PATH_MAX], path[PATH_MAX];
    dray__folder_path(self->o.folder, "trace", folder);
    DIR *listing = opendir(folder);
    for (struct dirent *entry; listing && (entry = readdir(listing));)
        if (dray__host_file_is_of(entry->d_name, label) &&
            dray__ends_with(entry->d_name, ".spans")) {
            dray__path(path, sizeof path, "%.*s/%s", PATH_MAX - 300, folder, entry->d_name);
            dray__account_end(path, dray__now());
        }
    if (listing)
        closedir(listing);
}

static void let_go(dray__hosts *self, const guest *of, bool gone)
{
    char label[DRAY__LABEL_BYTES];
    for (uint32_t r = 0; r < self->o.job->role_count; r++)
        for (uint32_t i = 0; i < self->roles[r].count; i++)
            if (self->roles[r].items[i].guest == of) {
                self->roles[r].items[i].guest = NULL;
                self->roles[r].items[i].stale = gone;
                end_accounts(self, label_of(&self->o.job->roles[r], i, label));
            }
}

/* Returns a role of the host that the run cannot go on without; NULL when there is none. */
static const dray__job_role *vital_role(const dray__hosts *self, const guest *of)
{
    for (uint32_t r = 0; r < self->o.job->role_count; r++)
        for (uint32_t i = 0; i < self->roles[r].count; i++)
            if (self->roles[r].items[i].guest == of &&
                self->o.job->roles[r].on_death == DRAY__ON_DEATH_END)
                return &self->o.job->roles[r];
    return NULL;
}

static __attribute__((format(printf, 2, 3))) void fail(dray__hosts *self, const char *format, ...)
{
    char message[DRAY_ERROR_MESSAGE_MAX];
    va_list arguments;
    if (self->failure.code)
        return;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    dray__fail(&self->failure, DRAY_EDEAD, "%s", message);
}

static guest *find_guest(const dray__hosts *self, uint64_t member)
{
    guest *g = self->guests;
    while (g && g->member != member)
        g = g->next;
    return g;
}

static void remove_guest(dray__hosts *self, guest *g, bool gone)
{
    guest **at = &self->guests;
    while (*at != g)
        at = &(*at)->next;
    *at = g->next;
    let_go(self, g, gone);
    json_decref(g->given);
    free(g);
    look_for_missing(self, dray__now());
}

/* Is called when a host's session has ended, because the process, the host or the connection ended.
 * Its rows are claimed again. */
static void take_gone(dray__hosts *self, uint64_t member)
{
    guest *g = find_guest(self, member);
    char had[256];
    if (!g)
        return;
    describe_places(self, g, had, sizeof had);
    const dray__job_role *vital = self->over || self->queue_ended ? NULL : vital_role(self, g);
    dray__reporter_say(self->o.reporter, "host",
                       "%s is gone: its session has ended (the host, or its link); it ran %s",
                       g->name, had);
    if (vital)
        fail(self, "host %s is gone, and with it %s: its session has ended (the host, or its link)",
             g->name, had);
    remove_guest(self, g, true);
}

/* ---- "join" ---------------------------------------------------------------------------------- */

static int check_run(const dray__hosts *self, const json_t *asked, dray_error *error)
{
    const char *id = dray__json_string(asked, "id"), *text = dray__json_string(asked, "text");
    long long epoch = dray__json_integer(asked, "epoch");
    const dray__folder *folder = self->o.folder;
    if (dray__json_integer(asked, "format") != DRAY__JOIN_FORMAT)
        return dray__fail(error, DRAY_EVERSION,
                          "join: the run speaks version %d of joining, the host %lld",
                          DRAY__JOIN_FORMAT, dray__json_integer(asked, "format"));
    if (id && *id && (strcmp(id, folder->id) != 0 || epoch != folder->epoch))
        return dray__fail(error, DRAY_ESTALE,
                          "join: job %s, start %lld expected, but job %s, start %lld runs here: "
                          "the host's processes belonged to another run",
                          id, epoch, folder->id, (long long)folder->epoch);
    if (!text || dray__hash(text, strlen(text)) != self->hash) {
        char where[256];
        dray__words_differ(self->o.text, text ? text : "", where, sizeof where);
        return dray__fail(error, DRAY_EINVALID,
                          "join: the host has another job file (hash %016" PRIx64
                          " expected, found %016" PRIx64 "); %s",
                          self->hash, text ? dray__hash(text, strlen(text)) : 0, where);
    }
    return self->over || self->queue_ended
               ? dray__fail(error, DRAY_ECLOSED, "join: the run is over")
               : DRAY_OK;
}

static int find_role(const dray__hosts *self, const char *name, uint32_t *out, dray_error *error)
{
    const char *known[16];
    char hint[200];
    for (*out = 0; *out < self->o.job->role_count; ++*out) {
        known[*out] = self->o.job->roles[*out].name;
        if (strcmp(known[*out], name) == 0)
            return DRAY_OK;
    }
    return dray__fail(error, DRAY_ENOENT, "join: the job has no role '%.64s'%s", name,
                      dray__word_hint_or_all(name, known, *out, hint, sizeof hint));
}

/* Returns whether the coordinator still has a session of this name, or of "NAME/RANK". */
static bool has_session(const json_t *sessions, const char *name)
{
    size_t i, length = strlen(name);
    const json_t *session;
    json_array_foreach(sessions, i, session)
    {
        const char *is = dray__json_string(session, "name");
        if (is && strncmp(is, name, length) == 0 && (!is[length] || is[length] == '/'))
            return true;
    }
    return false;
}

/* Looks for places that are still stale. Processes of a lost host have sessions of their own, which
 * end when the coordinator notices. Until then their places are not given away. */
static void look_at_stale(dray__hosts *self, const char *text)
{
    char name[DRAY__LABEL_BYTES + 16], label[DRAY__LABEL_BYTES];
    json_t *status = NULL;
    bool any = false;
    for (uint32_t r = 0; r < self->o.job->role_count; r++)
        for (uint32_t i = 0; i < self->roles[r].count; i++)
            any = any || self->roles[r].items[i].stale;
    if (!any || !text)
        return;
    dray__json_parse(text, strlen(text), "status", &status, NULL);
    const json_t *sessions = json_object_get(status, "sessions");
    for (uint32_t r = 0; sessions && r < self->o.job->role_count; r++)
        for (uint32_t i = 0; i < self->roles[r].count; i++) {
            const dray__job_role *role = &self->o.job->roles[r];
            label_of(role, i, label);
            if (role->spread)
                snprintf(name, sizeof name, "%s/%u", label, i);
            else
                snprintf(name, sizeof name, "%s", label);
            self->roles[r].items[i].stale =
                self->roles[r].items[i].stale && has_session(sessions, name);
        }
    json_decref(status);
}

/* Checks the request before any place is given. */
static int check_places(const dray__hosts *self, json_t *wanted, dray_error *error)
{
    const char *name;
    json_t *value;
    uint32_t r;
    json_object_foreach(wanted, name, value)
    {
        int rc = find_role(self, name, &r, error);
        if (rc)
            return rc;
        const places *p = &self->roles[r];
        json_int_t want = json_integer_value(value);
        if (want < 1 || want > p->count)
            return dray__fail(error, DRAY_EINVALID, "join: role %s: 1 to %u expected, found %lld",
                              name, p->count, (long long)want);
        if (p->local == p->count)
            return dray__fail(error, DRAY_EINVALID,
                              "join: role %s runs on the run's own host (roles.%s.local is %u)",
                              name, name, p->local);
        if (want > free_places(p))
            return dray__fail(error, DRAY_EBUSY,
                              "join: role %s: %lld places wanted, %u of %u are free (%u are the "
                              "run's own host's)",
                              name, (long long)want, free_places(p), p->count - p->local, p->local);
    }
    return json_object_size(wanted) ? DRAY_OK
                                    : dray__fail(error, DRAY_EINVALID, "join: no role is wanted");
}

static void give_places(dray__hosts *self, json_t *wanted, guest *to, uint16_t port, json_t *given)
{
    const char *name;
    json_t *value;
    uint32_t r = 0;
    json_object_foreach(wanted, name, value)
    {
        json_int_t left = json_integer_value(value);
        find_role(self, name, &r, NULL);
        places *p = &self->roles[r];
        for (uint32_t i = p->local; i < p->count && left; i++) {
            if (p->items[i].guest || p->items[i].stale)
                continue;
            left--;
            p->items[i].guest = to;
            json_int_t epoch = (json_int_t)p->items[i].taken++ * EPOCHS_A_PLACE;
            dray__json_append(&given, json_pack("{s:s, s:i, s:I}", "role", name, "number", (int)i,
                                                "epoch", epoch));
            if (self->o.job->roles[r].spread && i == 0) {
                snprintf(p->master, sizeof p->master, "%s", to->address);
                p->port = port;
            }
        }
    }
}

static json_t *masters_json(const dray__hosts *self)
{
    json_t *all = json_object();
    for (uint32_t r = 0; r < self->o.job->role_count; r++)
        if (self->roles[r].master[0])
            json_object_set_new(all, self->o.job->roles[r].name,
                                json_pack("[s, i]", self->roles[r].master, self->roles[r].port));
    return all;
}

/* Gives the host a unique name for messages: "node7", "node7-2". */
static void name_guest(const dray__hosts *self, guest *g, const char *name)
{
    bool used = true;
    char given[49];
    dray__take_line(given, sizeof given, name && *name ? name : "host");
    for (int n = 1; used; n++) {
        used = false;
        snprintf(g->name, sizeof g->name, n == 1 ? "%s" : "%s-%d", given, n);
        for (const guest *other = self->guests; other; other = other->next)
            used = used || strcmp(other->name, g->name) == 0;
    }
}

static json_t *join_answer(const dray__hosts *self, const guest *g)
{
    const dray__folder *folder = self->o.folder;
    return json_pack("{s:s, s:I, s:I, s:I, s:s, s:O, s:o}", "id", folder->id, "epoch",
                     (json_int_t)folder->epoch, "first_step", (json_int_t)folder->first_step,
                     "eval_from", (json_int_t)folder->eval_from, "name", g->name, "places",
                     g->given, "masters", masters_json(self));
}

static int take_join(dray__hosts *self, const dray__host_asked *from, const json_t *asked,
                     json_t **told, dray_error *error)
{
    json_t *wanted = json_object_get(asked, "roles"), *given = json_array();
    char has[256], key[KEY];
    dray__take_line(key, sizeof key, dray__json_string(asked, "key"));
    int rc = check_run(self, asked, error);
    /* The same process joins again, before the coordinator has noticed the end of its last
     * session. (After that, an event whose answer was lost is told twice.) */
    json_int_t said = 0;
    for (guest *g = self->guests, *next; g && !rc && *key; g = next) {
        next = g->next;
        if (strcmp(g->key, key) != 0)
            continue;
        said = g->said > said ? g->said : said;
        take_gone(self, g->member);
    }
    if (!rc)
        rc = check_places(self, wanted, error);
    guest *g = rc ? NULL : calloc(1, sizeof *g);
    if (!rc && (!g || !given))
        rc = dray__nomem(error);
    if (rc) {
        free(g);
        json_decref(given);
        return rc;
    }
    g->member = from->member;
    g->heard_ns = self->moved_ns = dray__now();
    g->said = said;
    snprintf(g->key, sizeof g->key, "%s", key);
    dray__take_line(g->address, sizeof g->address, dray__json_string(asked, "address"));
    name_guest(self, g, dray__json_string(asked, "name"));
    give_places(self, wanted, g, (uint16_t)dray__json_integer(asked, "port"), given);
    g->given = given;
    g->next = self->guests;
    self->guests = g;
    look_for_missing(self, dray__now());
    dray__reporter_say(self->o.reporter, "host", "%s (%s) has joined, and runs %s", g->name,
                       g->address, describe_places(self, g, has, sizeof has));
    *told = join_answer(self, g);
    return DRAY_OK;
}

/* ---- "pulse", "leave" ------------------------------------------------------------------------ */

/* Returns whether the host may write this file. A host writes only files of its own processes. */
static bool may_write(const dray__hosts *self, const guest *g, const char *name)
{
    char label[DRAY__LABEL_BYTES], own[NAME + 16];
    const char *slash = strchr(name, '/'), *file = slash ? slash + 1 : "";
    bool known = strncmp(name, "logs/", 5) == 0 || strncmp(name, "trace/", 6) == 0;
    if (!known || !*file || strchr(file, '/') || strstr(file, "..") || strlen(file) > 160)
        return false;
    snprintf(own, sizeof own, "host-%s.log", g->name);
    if (strcmp(file, own) == 0)
        return name[0] == 'l';
    for (uint32_t r = 0; r < self->o.job->role_count; r++)
        for (uint32_t i = 0; i < self->roles[r].count; i++) {
            label_of(&self->o.job->roles[r], i, label);
            if (self->roles[r].items[i].guest == g && dray__host_file_is_of(file, label))
                return true;
        }
    return false;
}

/* Leaves out files that the host may not write: those of a former place, and those that its
 * programs have put beside their own. Lists those that cannot be written, which the host sends
 * again. */
static int bring_home(dray__hosts *self, guest *g, const json_t *files, const dray__host_ask *ask,
                      json_t *unkept, dray_error *error)
{
    size_t i, at = 0;
    const json_t *file;
    dray_error why;
    json_array_foreach(files, i, file)
    {
        const char *name = dray__json_string(file, "name");
        long long size = dray__json_integer(file, "size"), offset = dray__json_integer(file, "at");
        if (!name || size < 0 || (size_t)size > ask->size - at || offset < 0 ||
            offset > INT64_C(1) << 40)
            return dray__fail(error, DRAY_EINVALID, "pulse: %.200s: not %lld bytes of a file",
                              name ? name : "?", size);
        const uint8_t *bytes = (const uint8_t *)ask->bytes + at;
        at += (size_t)size;
        if (may_write(self, g, name) &&
            dray__host_files_put(self->o.folder->path, name, bytes, (size_t)size, offset, &why) &&
            json_array_append_new(unkept, json_string(name)))
            return dray__nomem(error);
    }
    if (json_array_size(unkept) && !g->unkept)
        dray__reporter_say(self->o.reporter, "warning",
                           "files of host %s cannot be brought home: %s", g->name, why.message);
    g->unkept = json_array_size(unkept) > 0;
    return DRAY_OK;
}

/* Events come again when the answer came too late for the host. */
static void take_said(dray__hosts *self, guest *g, const json_t *said)
{
    size_t i;
    const json_t *one;
    json_array_foreach(said, i, one)
    {
        json_int_t number = dray__json_integer(one, "number");
        if (number && number <= g->said)
            continue;
        g->said = number ? number : g->said;
        const char *event = dray__json_string(one, "event"), *text = dray__json_string(one, "text");
        char kind[NAME], line[SAID];
        if (event && text)
            dray__reporter_say(self->o.reporter, dray__take_line(kind, sizeof kind, event),
                               "host %s: %s", g->name, dray__take_line(line, sizeof line, text));
    }
}

static int take_pulse(dray__hosts *self, guest *g, const json_t *asked, const dray__host_ask *ask,
                      json_t **told, dray_error *error)
{
    const char *failed = dray__json_string(asked, "failed");
    char line[SAID];
    dray__take_line(line, sizeof line, failed);
    g->heard_ns = dray__now();
    g->silent = false;
    g->begun = true;
    if (dray__json_true(asked, "busy"))
        self->moved_ns = g->heard_ns;
    take_said(self, g, json_object_get(asked, "say"));
    if (failed && !self->over && vital_role(self, g))
        fail(self, "host %s: %s", g->name, line);
    else if (failed && !self->over)
        dray__reporter_say(self->o.reporter, "warning", "host %s leaves: %s", g->name, line);
    *told = json_pack("{s:I, s:b, s:b, s:s, s:[]}", "progress",
                      (json_int_t)dray__reporter_progress(self->o.reporter), "ended",
                      self->queue_ended, "over", self->over, "why", self->why, "unkept");
    return *told ? bring_home(self, g, json_object_get(asked, "files"), ask,
                              json_object_get(*told, "unkept"), error)
                 : dray__nomem(error);
}

static int take_leave(dray__hosts *self, guest *g, json_t **told)
{
    char had[256];
    const dray__job_role *vital = self->over || self->queue_ended ? NULL : vital_role(self, g);
    describe_places(self, g, had, sizeof had);
    dray__reporter_say(self->o.reporter, "host", "%s has left; it ran %s", g->name, had);
    if (vital)
        fail(self, "host %s has left, and with it %s", g->name, had);
    remove_guest(self, g, false);
    *told = json_object();
    return DRAY_OK;
}

/* ---- the thread ------------------------------------------------------------------------------ */

static int handle(dray__hosts *self, const dray__host_asked *from, json_t **told, dray_error *error)
{
    json_t *asked = NULL;
    const dray__host_ask *ask = &from->ask;
    guest *g = find_guest(self, from->member);
    bool join = strcmp(ask->what, "join") == 0;
    int rc = dray__json_parse(ask->json, ask->json_size, "a host's request", &asked, error);
    bool again = join && g && !g->begun; /* it asks again, because the answer came too late */
    if (!rc && join && g && !again)
        rc = dray__fail(error, DRAY_EEXIST, "join: this session has joined already");
    else if (!rc && !join && !g)
        rc = dray__fail(error, DRAY_ESTALE, "%s: this session has not joined", ask->what);
    if (!rc && again)
        *told = join_answer(self, g);
    else if (!rc && join)
        rc = take_join(self, from, asked, told, error);
    else if (!rc && strcmp(ask->what, "pulse") == 0)
        rc = take_pulse(self, g, asked, ask, told, error);
    else if (!rc && strcmp(ask->what, "leave") == 0)
        rc = take_leave(self, g, told);
    else if (!rc)
        rc = dray__fail(error, DRAY_EUNSUPPORTED, "a host asks '%s': not known here", ask->what);
    if (!rc && !*told)
        rc = dray__nomem(error);
    json_decref(asked);
    return rc;
}

/* Reports each host that has been silent for long, once. */
static void look_for_silence(dray__hosts *self, int64_t now)
{
    char has[256];
    for (guest *g = self->guests; g; g = g->next) {
        if (g->silent || now - g->heard_ns < SILENT_SECONDS * DRAY__SECOND)
            continue;
        g->silent = true;
        dray__reporter_say(self->o.reporter, "warning",
                           "host %s has not been heard for %.0f s; it runs %s", g->name,
                           (double)(now - g->heard_ns) / (double)DRAY__SECOND,
                           describe_places(self, g, has, sizeof has));
    }
}

typedef struct reply {
    dray_error error;
    char *text;
} reply;

static void answer_all(dray__hosts *self, const dray__host_asks *asks, dray__host_answer *answers,
                       reply *replies, uint32_t *count)
{
    bool joins = false;
    char *status = NULL;
    *count = 0;
    /* Asks the coordinator without the lock. The supervisor's loop waits for the lock and also runs
     * the keeper, and the coordinator may wait for the keeper. */
    for (uint32_t i = 0; i < asks->count; i++)
        joins = joins || strcmp(asks->items[i].ask.what, "join") == 0;
    if (joins)
        dray_context_status(self->context, &status, NULL);
    pthread_mutex_lock(&self->worker.lock);
    look_at_stale(self, status);
    free(status);
    for (uint32_t i = 0; i < asks->count; i++) {
        const dray__host_asked *from = &asks->items[i];
        if (!from->number) {
            take_gone(self, from->member);
            continue;
        }
        reply *r = &replies[*count];
        json_t *told = NULL;
        int rc = handle(self, from, &told, &r->error);
        r->text = told ? json_dumps(told, JSON_COMPACT) : NULL;
        if (!rc && !r->text)
            rc = dray__nomem(&r->error);
        json_decref(told);
        answers[(*count)++] = (dray__host_answer){.number = from->number,
                                                  .code = rc,
                                                  .message = rc ? r->error.message : "",
                                                  .json = r->text,
                                                  .json_size = r->text ? strlen(r->text) : 0};
    }
    look_for_silence(self, dray__now());
    pthread_mutex_unlock(&self->worker.lock);
}

static void *serve(void *user)
{
    dray__hosts *self = user;
    static dray__host_answer answers[ANSWERS]; /* static, as there is only one such thread */
    static reply replies[ANSWERS];
    uint32_t count = 0;
    bool go_on = true;
    while (go_on) {
        dray__arena texts = {0};
        dray__host_asks asks = {0};
        const dray__host_next message = {SLICE_MS * DRAY__MILLISECOND, answers, count};
        int rc = dray__ask(self->channel, DRAY__MSG_HOST_NEXT, &dray__host_next_fields, &message,
                           dray__deadline(60 * DRAY__SECOND), &texts, &dray__host_asks_fields,
                           &asks, NULL);
        for (uint32_t i = 0; i < count; i++)
            free(replies[i].text);
        count = 0;
        if (!rc)
            answer_all(self, &asks, answers, replies, &count);
        dray__arena_free(&texts);
        pthread_mutex_lock(&self->worker.lock);
        /* The supervisor itself notices a coordinator that is gone. */
        go_on = !rc && (!self->worker.ending || count);
        pthread_mutex_unlock(&self->worker.lock);
    }
    for (uint32_t i = 0; i < count; i++)
        free(replies[i].text);
    return NULL;
}

/* ---- from the supervisor's thread ------------------------------------------------------------ */

static int open_places(dray__hosts *self, dray_error *error)
{
    const dray__job *job = self->o.job;
    self->roles = calloc(job->role_count, sizeof *self->roles);
    for (uint32_t r = 0; self->roles && r < job->role_count; r++) {
        places *p = &self->roles[r];
        const dray__job_role *role = &job->roles[r];
        p->count = (uint32_t)dray__role_places(role);
        p->local = (uint32_t)role->local;
        p->items = calloc(p->count, sizeof *p->items);
        if (!p->items)
            return dray__nomem(error);
        if (role->spread && p->local) {
            snprintf(p->master, sizeof p->master, "%s", self->o.listen);
            p->port = dray__free_port();
        }
    }
    return self->roles ? DRAY_OK : dray__nomem(error);
}

int dray__hosts_start(const dray__hosts_options *options, dray__hosts **out, dray_error *error)
{
    dray__hosts *self = calloc(1, sizeof *self);
    if (!self)
        return dray__nomem(error);
    dray__worker_init(&self->worker);
    self->o = *options;
    self->hash = dray__hash(options->text, strlen(options->text));
    self->moved_ns = dray__now();
    dray_options o = DRAY_OPTIONS_INIT;
    o.address = options->address;
    o.name = "supervisor";
    int rc = open_places(self, error);
    if (!rc)
        look_for_missing(self, dray__now());
    if (!rc)
        rc = dray_open(&o, &self->context, error);
    if (!rc)
        rc = dray__channel_open(self->context, &self->channel, error);
    if (!rc)
        rc = dray__thread_start(&self->worker.thread, serve, self, "the supervisor", error);
    if (rc)
        dray__hosts_free(self);
    else
        *out = self;
    return rc;
}

static void describe_missing(const dray__hosts *self, dray__hosts_sight *out)
{
    for (uint32_t r = 0; r < self->o.job->role_count; r++) {
        const places *p = &self->roles[r];
        size_t used = strlen(out->missing);
        if (!p->missing_ns || (self->o.job->roles[r].task_count == 0))
            continue;
        if (!out->missing_ns || p->missing_ns < out->missing_ns)
            out->missing_ns = p->missing_ns;
        snprintf(out->missing + used, sizeof out->missing - used, "%srole %s: %u of %u %s are here",
                 used ? "; " : "", self->o.job->roles[r].name, p->count - free_places(p), p->count,
                 self->o.job->roles[r].spread ? "ranks" : "instances");
    }
}

void dray__hosts_look(dray__hosts *self, dray__hosts_sight *out)
{
    char has[256];
    int64_t now = dray__now();
    *out = (dray__hosts_sight){.count = 0};
    if (!self)
        return;
    pthread_mutex_lock(&self->worker.lock);
    out->failure = self->failure;
    out->moved_ns = self->moved_ns;
    describe_missing(self, out);
    for (const guest *g = self->guests; g; g = g->next) {
        size_t used = strlen(out->described);
        out->count++;
        snprintf(out->described + used, sizeof out->described - used,
                 "%shost %s (heard %.1f s ago) runs %s", used ? "; " : "", g->name,
                 (double)(now - g->heard_ns) / (double)DRAY__SECOND,
                 describe_places(self, g, has, sizeof has));
    }
    pthread_mutex_unlock(&self->worker.lock);
}

void dray__hosts_queue_ended(dray__hosts *self)
{
    if (!self)
        return;
    pthread_mutex_lock(&self->worker.lock);
    self->queue_ended = true;
    pthread_mutex_unlock(&self->worker.lock);
}

void dray__hosts_end(dray__hosts *self, const char *why, int64_t deadline_ns)
{
    bool any = self != NULL;
    if (!self)
        return;
    pthread_mutex_lock(&self->worker.lock);
    self->over = true;
    snprintf(self->why, sizeof self->why, "%s", why);
    pthread_mutex_unlock(&self->worker.lock);
    while (any && dray__now() < deadline_ns) {
        pthread_mutex_lock(&self->worker.lock);
        any = self->guests != NULL;
        dray__cond_wait(&self->worker.wake, &self->worker.lock,
                        dray__deadline(any ? 20 * DRAY__MILLISECOND : 0));
        pthread_mutex_unlock(&self->worker.lock);
    }
}

void dray__hosts_free(dray__hosts *self)
{
    if (!self)
        return;
    dray__worker_end(&self->worker);
    dray__channel_close(self->channel);
    dray_close(self->context);
    while (self->guests) {
        guest *g = self->guests;
        self->guests = g->next;
        json_decref(g->given);
        free(g);
    }
    for (uint32_t r = 0; self->roles && r < self->o.job->role_count; r++)
        free(self->roles[r].items);
    free(self->roles);
    free(self);
}

bool dray__hosts_master(dray__hosts *self, const dray__job_role *role, char address[64],
                        uint16_t *port)
{
    const places *p = &self->roles[role - self->o.job->roles];
    pthread_mutex_lock(&self->worker.lock);
    snprintf(address, 64, "%s", p->master);
    *port = p->port;
    pthread_mutex_unlock(&self->worker.lock);
    return address[0] != 0;
}
