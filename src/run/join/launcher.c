#include "run/join/launcher.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/json.h"
#include "net/address.h"
#include "run/job/contract.h"
#include "run/paths.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The variables that launchers set. Sources: srun(1); torch/distributed/run.py; Open MPI's FAQ,
 * "environment variables"; the process manager's interface of MPICH and Intel MPI. ids together
 * identify one start: they are the same in all of its processes, and in no others. */
typedef struct kind {
    const char *name, *rank, *size, *host;
    const char *ids[3];
} kind;

static const kind kinds[] = {
    {"Slurm",
     "SLURM_PROCID",
     "SLURM_NTASKS",
     "SLURMD_NODENAME",
     {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"}},
    {"torchrun",
     "RANK",
     "WORLD_SIZE",
     NULL,
     {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"}},
    {"Open MPI",
     "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     NULL,
     {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", NULL}},
    {"mpirun", "PMI_RANK", "PMI_SIZE", NULL, {"PMI_ID", "HYDI_CONTROL_FD", NULL}},
};

static int number_of(const char *variable, uint32_t *out, dray_error *error)
{
    const char *text = getenv(variable);
    char *end = NULL;
    errno = 0;
    long value = text ? strtol(text, &end, 10) : -1;
    if (!text || errno || end == text || *end || value < 0 || value > 1 << 24)
        return dray__fail(error, DRAY_EINVALID, "$%s: expected a number, found '%.40s'", variable,
                          text ? text : "");
    *out = (uint32_t)value;
    return DRAY_OK;
}

int dray__launcher_find(dray__launcher *out, dray_error *error)
{
    const kind *found = NULL;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds && !found; i++)
        found = getenv(kinds[i].rank) && getenv(kinds[i].size) ? &kinds[i] : NULL;
    if (!found)
        return dray__fail(error, DRAY_ENOENT,
                          "--lead: neither Slurm ($SLURM_PROCID), torchrun ($RANK), nor mpirun "
                          "($OMPI_COMM_WORLD_RANK, $PMI_RANK) started this process");
    *out = (dray__launcher){.name = found->name, .host = found->host ? getenv(found->host) : NULL};
    for (size_t i = 0; i < 3 && found->ids[i]; i++) {
        const char *id = getenv(found->ids[i]);
        size_t used = strlen(out->launch);
        if (strcmp(found->ids[i], "PMI_ID") != 0 && id)
            snprintf(out->launch + used, sizeof out->launch - used, "%s%.48s", used ? "/" : "", id);
    }
    int rc = number_of(found->rank, &out->rank, error);
    return rc ? rc : number_of(found->size, &out->size, error);
}

int dray__launcher_lead(const dray__launcher *launcher, const char *listen, dray_error *error)
{
    char name[65] = "", text[256];
    dray__address address;
    const char *host = getenv("DRAY_DATA_ADDRESS");
    setenv("DRAY_LAUNCH", launcher->launch, 1);
    if (getenv("DRAY_LISTEN") || listen[0]) {
        setenv("DRAY_LISTEN", listen, 0);
        return DRAY_OK;
    }
    gethostname(name, sizeof name - 1);
    host = host && host[0] ? host : launcher->host ? launcher->host : name;
    snprintf(text, sizeof text, strchr(host, ':') ? "tcp:[%.80s]:%u" : "tcp:%.80s:%u", host,
             dray__free_port());
    int rc = dray__address_parse(text, &address, error);
    setenv("DRAY_LISTEN", text, 1);
    return rc;
}

/* Returns whether somebody listens there. */
static bool is_heard(const char *listen)
{
    dray__address address;
    int fd;
    if (dray__address_parse(listen, &address, NULL) ||
        dray__address_connect(&address, listen, dray__deadline(2 * DRAY__SECOND), &fd, NULL))
        return false;
    close(fd);
    return true;
}

/* Not every launcher gives each of its starts another name: torchrun and mpirun may repeat theirs,
 * and then the file may be that of an earlier start, at whose address nobody listens any more. */
int dray__launcher_follow(const dray__launcher *launcher, const char *folder, const char *address,
                          double wait_seconds, dray_error *error)
{
    enum { AGAIN_MS = 50 };
    char path[PATH_MAX];
    int64_t deadline = dray__deadline((int64_t)(wait_seconds * (double)DRAY__SECOND));
    dray__path(path, sizeof path, "%s/run.json", folder);
    do {
        json_t *is = NULL;
        const char *launch = NULL, *listen = NULL;
        if (dray__json_load(path, 4096, &is, NULL) == DRAY_OK) {
            launch = dray__json_string(is, "launch");
            listen = dray__json_string(is, "listen");
        }
        bool found = launch && listen && strcmp(launch, launcher->launch) == 0;
        found = found && is_heard(address ? address : listen);
        if (found)
            setenv("DRAY_LISTEN", listen, 1);
        json_decref(is);
        if (found)
            return DRAY_OK;
        poll(NULL, 0, AGAIN_MS);
    } while (dray__now() < deadline);
    return dray__fail(error, DRAY_ETIMEDOUT,
                      "%s: rank 0 of this start (%s %s) has not begun the run in %.0f s", path,
                      launcher->name, launcher->launch, wait_seconds);
}

int dray__launcher_is_for(const char *text, uint32_t rank, bool *is, const char **rest,
                          dray_error *error)
{
    const char *equal = strchr(text, '=');
    unsigned first = 0, last = 0;
    int read = 0;
    *rest = equal ? equal + 1 : text;
    *is = true;
    if (!equal)
        return DRAY_OK;
    bool range = sscanf(text, "%u-%u%n", &first, &last, &read) == 2;
    if (!range && sscanf(text, "%u%n", &first, &read) == 1)
        last = first;
    if (text + read != equal || last < first)
        return dray__fail(error, DRAY_EINVALID,
                          "--roles '%.80s': expected RANK=ROLE:COUNT or FIRST-LAST=ROLE:COUNT",
                          text);
    *is = first <= rank && rank <= last;
    return DRAY_OK;
}
