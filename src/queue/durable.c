/* Which queues are durable, and where: files of the coordinator's folder. */
#include "queue/service.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/log.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A journal is found again by its ending; what only checkpoints are made of is not. */
static const char *const endings[] = {
    [DRAY_DURABILITY_CHECKPOINT] = "scratch", [DRAY_DURABILITY_JOURNAL] = "journal"};

static int path_of(const dray__controller *self, const dray__opening *o, char **out,
                   dray_error *error)
{
    if (!self->folder)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "queue %s: it is to be durable, but the coordinator has no folder for "
                          "journals (dray serve --journal FOLDER)",
                          o->name);
    if (asprintf(out, "%s/queue-%016llx.%s", self->folder,
                 (unsigned long long)dray__hash(o->name, strlen(o->name)),
                 endings[o->settings.durability]) < 0)
        return dray__nomem(error);
    return DRAY_OK;
}

static int make_table(void *user, dray__reader *opening, dray__table **out, dray_error *error)
{
    dray__controller *self = user;
    dray__arena arena = {0};
    dray__opening o = {0};
    int64_t timeout;
    int rc = dray__get_opening(opening, &arena, &o, &timeout, error);
    if (!rc)
        rc = dray__table_new(o.name, o.tasks, o.task_count, &o.settings, out, error);
    if (!rc)
        rc = dray__store_draw(self, *out, error);
    if (!rc) { /* chunks that are dropped meanwhile are told to the keeper afterwards */
        (*out)->drop = dray__drops_add;
        (*out)->user = &self->drops;
    }
    dray__arena_free(&arena);
    return rc;
}

static int copy_file(const char *from, const char *to, dray_error *error)
{
    int in = open(from, O_RDONLY | O_CLOEXEC), rc = DRAY_OK;
    if (in < 0)
        return dray__fail_errno(error, errno, "checkpoint %s", from);
    int out = open(to, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    ssize_t n = 1;
    if (out < 0)
        rc = dray__fail_errno(error, errno, "journal %s", to);
    while (!rc && n > 0) {
        n = copy_file_range(in, NULL, out, NULL, 1 << 30, 0);
        if (n < 0)
            rc = dray__fail_errno(error, errno, "copying checkpoint %s to %s", from, to);
    }
    if (!rc && fsync(out) < 0)
        rc = dray__fail_errno(error, errno, "journal %s", to);
    close(in);
    if (out >= 0)
        close(out);
    if (rc && out >= 0)
        unlink(to);
    return rc;
}

/* The table of a checkpoint; path: of a journal that goes on from there, or NULL. */
static int restore(dray__controller *self, const dray__opening *o, const char *path,
                   dray__table **out, dray_error *error)
{
    dray__ledger_options options = {.path = path ? path : o->restore,
                                    .keeper_path = self->keeper_path,
                                    .era = self->homes.era,
                                    .sync = o->settings.durability == DRAY_DURABILITY_JOURNAL,
                                    .kept = path != NULL};
    dray__table *table = NULL;
    int rc = path ? copy_file(o->restore, path, error) : DRAY_OK;
    bool copied = path && !rc;
    if (!rc && (rc = dray__ledger_recover(&options, make_table, self, &table, error)))
        dray__fail_prefix(error, rc, "checkpoint %s: ", o->restore);
    if (!rc && !table)
        rc = dray__fail(error, DRAY_EFORMAT, "%s is no queue's checkpoint", o->restore);
    dray__settings wanted = o->settings;
    wanted.durability = 0; /* may be another one than when it was saved */
    if (!rc && strcmp(table->name, o->name) != 0)
        rc = dray__fail(error, DRAY_EINVALID, "%s is a checkpoint of queue %s, not %s", o->restore,
                        table->name, o->name);
    if (!rc)
        rc = dray__table_same(table, o->tasks, o->task_count, &wanted, error);
    if (rc) {
        if (table) {
            dray__ledger_end_of(table);
            dray__table_free(table);
        }
        if (copied)
            unlink(path);
        return rc;
    }
    table->settings.durability = o->settings.durability;
    *out = table;
    return DRAY_OK;
}

static int begin_ledger(dray__controller *self, const dray__opening *o, dray__request *request,
                        const char *path, dray__table *table, dray_error *error)
{
    const dray__reader *opening = dray__request_payload(request);
    dray__ledger_options options = {.path = path,
                                    .keeper_path = self->keeper_path,
                                    .era = self->homes.era,
                                    .sync = o->settings.durability == DRAY_DURABILITY_JOURNAL,
                                    .kept = true};
    return dray__ledger_new(table, &options, opening->data, opening->size, error);
}

int dray__durable_new(dray__controller *self, const dray__opening *o, dray__request *request,
                      dray__table **out, dray_error *error)
{
    dray__table *table = NULL;
    char *path = NULL;
    int rc = DRAY_OK;
    if (o->settings.durability > DRAY_DURABILITY_NONE)
        rc = path_of(self, o, &path, error);
    if (!rc && o->restore[0]) {
        rc = restore(self, o, path, out, error);
        free(path);
        return rc;
    }
    if (!rc)
        rc = dray__table_new(o->name, o->tasks, o->task_count, &o->settings, &table, error);
    if (!rc)
        rc = dray__store_draw(self, table, error);
    if (!rc && path)
        rc = begin_ledger(self, o, request, path, table, error);
    free(path);
    if (rc && table) {
        dray__ledger_end_of(table);
        dray__table_free(table);
        return rc;
    }
    *out = table;
    return rc;
}

static bool ends_with(const char *name, const char *ending)
{
    size_t length = strlen(name), tail = strlen(ending);
    return length > tail && strcmp(name + length - tail, ending) == 0;
}

static int recover_file(dray__controller *self, const char *path,
                        int (*serve)(dray__controller *, dray__table *, dray_error *),
                        dray_error *error)
{
    dray__ledger_options options = {.path = path,
                                    .keeper_path = self->keeper_path,
                                    .era = self->homes.era,
                                    .sync = true,
                                    .kept = true};
    dray__table *table = NULL;
    int rc = dray__ledger_recover(&options, make_table, self, &table, error);
    if (rc)
        return rc;
    if (table) { /* what opened it may have been a checkpoint's queue, and this goes on from one */
        table->settings.durability = DRAY_DURABILITY_JOURNAL;
        rc = serve(self, table, error);
        return rc ? rc : dray__store_former(self, self->queues->table, error);
    }
    /* Not even the queue's opening got into it, so nobody was told that there is such a queue. */
    dray__log(DRAY_LOG_INFO, "queue: journal %s holds nothing: removed", path);
    unlink(path);
    return DRAY_OK;
}

int dray__durable_recover(dray__controller *self,
                          int (*serve)(dray__controller *, dray__table *, dray_error *),
                          dray_error *error)
{
    if (mkdir(self->folder, 0700) < 0 && errno != EEXIST)
        return dray__fail_errno(error, errno, "folder of journals %s", self->folder);
    dray__keeper_link link;
    int rc = dray__keeper_link_init(&link, self->keeper_path, DRAY__KEEPER_PATIENCE, error);
    link.era = self->homes.era;
    if (!rc && self->keeper_path) /* what it holds is of a controller that is gone */
        rc = dray__keeper_reset(&link, error);
    dray__keeper_link_free(&link);
    DIR *dir = rc ? NULL : opendir(self->folder);
    if (!rc && !dir)
        rc = dray__fail_errno(error, errno, "folder of journals %s", self->folder);
    for (struct dirent *entry; !rc && (entry = readdir(dir));) {
        char path[4096];
        if (strncmp(entry->d_name, "queue-", 6) != 0)
            continue;
        if (snprintf(path, sizeof path, "%s/%s", self->folder, entry->d_name) >= (int)sizeof path)
            rc = dray__fail(error, DRAY_EINVALID, "folder of journals %s: too long", self->folder);
        else if (ends_with(path, ".journal"))
            rc = recover_file(self, path, serve, error);
        else if (ends_with(path, ".scratch") || ends_with(path, ".new"))
            unlink(path);
    }
    if (dir)
        closedir(dir);
    return rc ? rc : dray__store_clean(self, error);
}
