#include "run/join/manifest.h"

#include "base/error.h"
#include "base/json.h"
#include "run/job/devices.h"
#include "run/job/settings.h"

#include <ctype.h>
#include <errno.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PORT = 7000, RESTARTS = 5, NAME_MOST = 40, WAIT_SECONDS = 600, GRACE_MORE = 60 };

int dray__manifest_job(const dray__manifest_options *o, json_t **out, dray_error *error)
{
    dray__job *job = NULL;
    int rc = dray__job_load(o->job, o->settings, o->setting_count, &job, NULL, error);
    if (!rc && !(*out = dray__settings_json(job)))
        rc = dray__nomem(error);
    dray__job_free(job);
    return rc;
}

typedef struct manifest {
    const dray__manifest_options *o;
    const dray__job *job;
    char name[NAME_MOST + 1]; /* of the JobSet */
    char file[PATH_MAX];      /* the job's, absolute */
    char folder[PATH_MAX];    /* the folder that the file is in */
    char out[PATH_MAX + 64];
    char listen[200];
} manifest;

/* Makes a name that Kubernetes accepts (RFC 1123). */
static void dns_name(const char *text, char *out, size_t capacity)
{
    size_t n = 0;
    for (; *text && n + 1 < capacity; text++) {
        char c = (char)tolower((unsigned char)*text);
        if (isalnum((unsigned char)c) || (n && c != '.'))
            out[n++] = isalnum((unsigned char)c) ? c : '-';
    }
    while (n && out[n - 1] == '-')
        n--;
    out[n] = 0;
}

/* Adds one word, quoted for a shell. */
static void add_word(char **line, const char *word)
{
    size_t used = *line ? strlen(*line) : 0;
    char *grown = realloc(*line, used + 4 * strlen(word) + 4);
    if (!grown)
        return;
    *line = grown;
    char *at = grown + used;
    if (used)
        *at++ = ' ';
    *at++ = '\'';
    for (; *word; word++)
        if (*word == '\'')
            at += sprintf(at, "'\\''");
        else
            *at++ = *word;
    strcpy(at, "'");
}

static json_t *settings_words(const manifest *m)
{
    json_t *words = json_array();
    for (uint32_t i = 0; i < m->o->setting_count; i++) {
        dray__json_append(&words, json_string("--set"));
        dray__json_append(&words, json_string(m->o->settings[i]));
    }
    return words;
}

/* A pod that is started again resumes the run in the folder. */
static json_t *run_command(const manifest *m)
{
    char *fresh = NULL, *resume = NULL, *config = NULL, *line = NULL, path[PATH_MAX + 96];
    const char *const first[] = {"dray", "run", m->file, "--out", m->out};
    const char *const again[] = {"dray", "run", "--resume", m->out};
    for (size_t i = 0; i < sizeof first / sizeof *first; i++)
        add_word(&fresh, first[i]);
    for (uint32_t i = 0; i < m->o->setting_count; i++) {
        add_word(&fresh, "--set");
        add_word(&fresh, m->o->settings[i]);
    }
    for (size_t i = 0; i < sizeof again / sizeof *again; i++)
        add_word(&resume, again[i]);
    snprintf(path, sizeof path, "%s/config.yaml", m->out);
    add_word(&config, path);
    if (!fresh || !resume || !config ||
        asprintf(&line, "if [ -e %s ]; then exec %s; else exec %s; fi", config, resume, fresh) < 0)
        line = NULL;
    json_t *command = line ? json_pack("[s, s, s]", "/bin/sh", "-c", line) : NULL;
    free(line);
    free(fresh);
    free(resume);
    free(config);
    return command;
}

static json_t *join_command(const manifest *m, const dray__job_role *role)
{
    char roles[64], wait[16];
    snprintf(roles, sizeof roles, "%.40s:1", role->name);
    snprintf(wait, sizeof wait, "%d", WAIT_SECONDS);
    json_t *command = json_pack("[s, s, s, s, s, s, s, s, s, s]", "dray", "join", "--job", m->file,
                                "--roles", roles, "--shared", m->out, "--wait", wait);
    json_t *more = settings_words(m);
    if (command && more)
        json_array_extend(command, more);
    json_decref(more);
    return command;
}

static int64_t gpus_of_place(const dray__job_role *role)
{
    dray__devices devices;
    if (dray__devices_read(role->devices, 0, 1, &devices, NULL) ||
        strcmp(devices.kind, "cuda") != 0)
        return 0;
    int64_t places = dray__role_places(role), each = devices.count / places;
    return each ? each : 1;
}

/* role is NULL for the run itself. */
static json_t *pod(const manifest *m, const dray__job_role *role)
{
    char secret[NAME_MOST + 16], claim[NAME_MOST + 16];
    int64_t gpus = role ? gpus_of_place(role) : 0;
    snprintf(secret, sizeof secret, "%s-tokens", m->name);
    snprintf(claim, sizeof claim, "%s-data", m->name);
    json_t *environment =
        json_pack("[{s:s, s:s}, {s:s, s:{s:{s:s, s:s}}}]", "name", "DRAY_LISTEN", "value",
                  m->listen, "name", "DRAY_TOKEN", "valueFrom", "secretKeyRef", "name", secret,
                  "key", role ? dray__role_token(role) : "master");
    json_t *container =
        json_pack("{s:s, s:s, s:o, s:o, s:[{s:s, s:s}]}", "name", "dray", "image", m->o->image,
                  "command", role ? join_command(m, role) : run_command(m), "env", environment,
                  "volumeMounts", "name", "data", "mountPath", m->folder);
    if (container && gpus)
        json_object_set_new(container, "resources",
                            json_pack("{s:{s:I}}", "limits", "nvidia.com/gpu", (json_int_t)gpus));
    return json_pack("{s:s, s:I, s:[o], s:[{s:s, s:{s:s}}]}", "restartPolicy", "Never",
                     "terminationGracePeriodSeconds",
                     (json_int_t)((role ? role->grace_seconds : 30) + GRACE_MORE), "containers",
                     container, "volumes", "name", "data", "persistentVolumeClaim", "claimName",
                     claim);
}

/* Makes one Job for each place. A Job that fails is restarted alone, up to `backoff` times. */
static json_t *replicated(const manifest *m, const char *name, int64_t count, int backoff,
                          const dray__job_role *role)
{
    char dns[NAME_MOST + 1];
    dns_name(name, dns, sizeof dns);
    return json_pack("{s:s, s:I, s:{s:{s:i, s:i, s:i, s:{s:o}}}}", "name", dns, "replicas",
                     (json_int_t)count, "template", "spec", "parallelism", 1, "completions", 1,
                     "backoffLimit", backoff, "template", "spec", pod(m, role));
}

static json_t *jobset(const manifest *m)
{
    json_t *jobs = json_array();
    dray__json_append(&jobs, replicated(m, "run", 1, 0, NULL));
    for (uint32_t i = 0; i < m->job->role_count; i++) {
        const dray__job_role *role = &m->job->roles[i];
        int64_t count = dray__role_places(role) - role->local;
        if (count > 0)
            dray__json_append(&jobs, replicated(m, role->name, count, RESTARTS, role));
    }
    return json_pack("{s:s, s:s, s:{s:s}, s:{s:{s:b, s:b}, s:{s:s, s:[s]}, s:{s:i}, s:o}}",
                     "apiVersion", "jobset.x-k8s.io/v1alpha2", "kind", "JobSet", "metadata", "name",
                     m->name, "spec", "network", "enableDNSHostnames", 1,
                     "publishNotReadyAddresses", 1, "successPolicy", "operator", "All",
                     "targetReplicatedJobs", "run", "failurePolicy", "maxRestarts", RESTARTS,
                     "replicatedJobs", jobs);
}

static int describe(manifest *m, dray_error *error)
{
    char copy[PATH_MAX];
    dns_name(m->job->name, m->name, sizeof m->name);
    if (!m->name[0])
        return dray__fail(error, DRAY_EINVALID,
                          "name: '%.64s': expected letters or digits, of which Kubernetes makes a "
                          "name",
                          m->job->name);
    if (!realpath(m->o->job, m->file))
        return dray__fail_errno(error, errno, "%s", m->o->job);
    strcpy(copy, m->file);
    snprintf(m->folder, sizeof m->folder, "%s", dirname(copy));
    if (m->o->out)
        snprintf(m->out, sizeof m->out, "%.4095s", m->o->out);
    else
        snprintf(m->out, sizeof m->out, "%.4095s/runs/%.40s", m->folder, m->name);
    /* JobSet's names of pods: NAME-JOB-INDEX-POD.NAME */
    snprintf(m->listen, sizeof m->listen, "tcp:%s-run-0-0.%s:%d", m->name, m->name, PORT);
    for (uint32_t i = 0; i < m->job->role_count; i++)
        if (m->job->roles[i].local < dray__role_places(&m->job->roles[i]))
            return DRAY_OK;
    return dray__fail(error, DRAY_EINVALID,
                      "roles: expected one that leaves places to other hosts (roles.NAME.local), "
                      "found none");
}

int dray__manifest_k8s(const dray__manifest_options *o, json_t **out, dray_error *error)
{
    dray__job *job = NULL;
    manifest m = {.o = o};
    /* Roles may leave places to other hosts only if the job has an address. The pods' own is set
     * below. */
    if (!getenv("DRAY_LISTEN"))
        setenv("DRAY_LISTEN", "tcp:127.0.0.1:7000", 1);
    int rc = dray__job_load(o->job, o->settings, o->setting_count, &job, NULL, error);
    m.job = job;
    if (!rc)
        rc = describe(&m, error);
    if (!rc && !(*out = jobset(&m)))
        rc = dray__nomem(error);
    dray__job_free(job);
    return rc;
}
