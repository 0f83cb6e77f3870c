#include "run/job/devices.h"

#include "base/error.h"
#include "control/protocol.h"
#include "control/token.h"

#include <dray/gpu.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NUMBER_MAX = 1023 };

/* ---- lists ----------------------------------------------------------------------------------- */

static bool has(const dray__devices *devices, uint32_t number)
{
    for (uint32_t i = 0; i < devices->count; i++)
        if (devices->numbers[i] == number)
            return true;
    return false;
}

/* "0-1,3" */
static bool read_list(const char *text, dray__devices *out)
{
    for (const char *at = text;;) {
        char *end;
        if (*at < '0' || *at > '9')
            return false;
        unsigned long first = strtoul(at, &end, 10), last = first;
        if (*end == '-' && end[1] >= '0' && end[1] <= '9')
            last = strtoul(end + 1, &end, 10);
        for (unsigned long n = first; n <= last; n++) {
            if (out->count == DRAY__DEVICES_MAX || n > NUMBER_MAX || has(out, (uint32_t)n))
                return false;
            out->numbers[out->count++] = (uint32_t)n;
        }
        if (last < first || (*end && *end != ','))
            return false;
        if (!*end)
            return true;
        at = end + 1;
    }
}

int dray__devices_read(const char *text, uint32_t part, uint32_t parts, dray__devices *out,
                       dray_error *error)
{
    static const char *const kinds[] = {"cpu", "cuda"};
    const char *numbers = strchr(text, ':');
    *out = (dray__devices){.kind = ""};
    if (!text[0])
        return DRAY_OK;
    for (size_t i = 0; numbers && i < 2; i++)
        if (strlen(kinds[i]) == (size_t)(numbers - text) &&
            strncmp(text, kinds[i], strlen(kinds[i])) == 0)
            out->kind = kinds[i];
    if (!out->kind[0] || !read_list(numbers + 1, out))
        return dray__fail(error, DRAY_EINVALID,
                          "expected cpu:N or cuda:N, where N is a number, a range (0-1) or a list "
                          "(0,2) of at most %d, none twice, found '%.64s'",
                          DRAY__DEVICES_MAX, text);
    if (parts && out->count % parts == 0) {
        out->count /= parts;
        memmove(out->numbers, out->numbers + (size_t)out->count * part,
                out->count * sizeof(*out->numbers));
    }
    return DRAY_OK;
}

int dray__devices_look(const dray__devices *devices, dray_error *error)
{
    int32_t count = 0;
    bool cuda = strcmp(devices->kind, "cuda") == 0;
    if (cuda && dray_gpu_count(&count, NULL, NULL))
        count = 0;
    if (!cuda)
        count = (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
    for (uint32_t i = 0; i < devices->count; i++)
        if (devices->numbers[i] >= (uint32_t)count)
            return dray__fail(error, DRAY_ENOENT, "no %s %u is there: this machine has %d",
                              cuda ? "GPU" : "core", devices->numbers[i], count);
    return DRAY_OK;
}

/* ---- leases ---------------------------------------------------------------------------------- */

/* The rights of a role's programs at the coordinator. A server without tasks generates for
 * others. */
static uint32_t bits_of(const dray__job_role *role)
{
    static const struct {
        const char *task;
        uint32_t bit;
    } kinds[] = {{"actor", DRAY__MAY_TRAINER},
                 {"old_log_prob", DRAY__MAY_TRAINER},
                 {"rollout", DRAY__MAY_ENGINE},
                 {"eval", DRAY__MAY_ENGINE}};
    uint32_t bits = role->task_count ? 0 : DRAY__MAY_ENGINE;
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
        bits |= dray__role_has(role, kinds[i].task) ? kinds[i].bit : 0;
    return bits ? bits : DRAY__MAY_TASK;
}

/* Gets the rights of all roles that have the device, and returns the number of these roles. */
static uint32_t find_roles(const dray__job *job, const char *kind, uint32_t number, uint32_t *bits)
{
    uint32_t roles = 0;
    *bits = 0;
    for (uint32_t i = 0; i < job->role_count; i++) {
        dray__devices of;
        if (dray__devices_read(job->roles[i].devices, 0, 1, &of, NULL) ||
            strcmp(of.kind, kind) != 0 || !has(&of, number))
            continue;
        *bits |= bits_of(&job->roles[i]);
        roles++;
    }
    return roles;
}

void dray__devices_leases(const dray__job *job, const dray__job_role *role, uint32_t instance,
                          char out[DRAY__LEASES_BYTES])
{
    static const char *const words[] = {"engine", "task", "trainer"};
    dray__devices own;
    size_t used = 0;
    out[0] = 0;
    if (dray__devices_read(role->devices, instance, (uint32_t)role->instances, &own, NULL))
        return;
    for (uint32_t i = 0; i < own.count; i++) {
        uint32_t bits, listed = 0;
        if (find_roles(job, own.kind, own.numbers[i], &bits) < 2)
            continue;
        for (size_t w = 0; w < 3; w++)
            if (bits & dray__role_bits(words[w]))
                used += (size_t)snprintf(out + used, DRAY__LEASES_BYTES - used, "%s%s",
                                         listed++ ? "+" : (used ? "," : ""), words[w]);
        used += (size_t)snprintf(out + used, DRAY__LEASES_BYTES - used, "/%s:%u", own.kind,
                                 own.numbers[i]);
    }
}
