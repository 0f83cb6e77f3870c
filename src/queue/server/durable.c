/* Durable queues, and their files in the coordinator's folder. */
#include "queue/server/service.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/io.h"
#include "base/log.h"
#include "base/words.h"
#include "queue/journal/journal_inside.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* A journal is found again by its ending. A file that serves checkpoints alone is not. */
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
    int rc = dray__opening_read(opening, &arena, &o, error);
    if (!rc)
        rc = dray__store_settle(self, &o.settings, o.name, error);
    if (!rc)
        rc = dray__table_new(o.name, o.tasks, o.task_count, &o.settings, out, error);
    if (!rc)
        rc = dray__store_draw(self, *out, error);
    if (!rc) { /* the keeper learns of chunks that are dropped meanwhile afterwards */
        (*out)->drop = dray__drops_add;
        (*out)->user = &self->drops;
    }
    dray__arena_free(&arena);
    return rc;
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

/* Takes the descriptor of a file that a client opened. It must be regular, and open for reading, or
 * for writing at any offset. *label is its name for messages. */
static int take_passed(dray__request *request, bool to_write, int *out, char **label,
                       dray_error *error)
{
    char link[64], name[4096];
    struct stat st;
    uint32_t count = dray__request_fd_count(request);
    int fd = count ? dray__request_take_fd(request, count - 1) : -1;
    int flags = fd < 0 ? -1 : fcntl(fd, F_GETFL), mode = flags & O_ACCMODE;
    if (flags < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || flags & O_APPEND ||
        mode == (to_write ? O_RDONLY : O_WRONLY)) {
        if (fd >= 0)
            close(fd);
        return dray__fail(error, DRAY_EINVALID,
                          "checkpoint: the descriptor of a regular file that is open for %s "
                          "expected with the message, found %s",
                          to_write ? "writing" : "reading", count ? "another one" : "none");
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, name, sizeof name - 1);
    name[n > 0 ? n : 0] = 0;
    if (asprintf(label, "checkpoint %s", n > 0 ? name : "that was passed") < 0) {
        close(fd);
        return dray__nomem(error);
    }
    *out = fd;
    return DRAY_OK;
}

/* Checks the name of a checkpoint in the coordinator's folder. */
static int check_saved(const dray__controller *self, const dray__request *request, const char *name,
                       dray_error *error)
{
    int rc = dray__saved_name_check(name, error);
    if (!rc && dray__request_type(request) == DRAY__MSG_QUEUE_CHECKPOINT &&
        dray__request_fd_count(request))
        rc = dray__fail(error, DRAY_EINVALID, "checkpoint %s: a name or a descriptor, not both",
                        name);
    if (!rc && self->folder_fd < 0)
        rc = dray__fail(error, DRAY_EUNSUPPORTED,
                        "checkpoint %s: the coordinator has no folder for it (dray serve "
                        "--journal FOLDER)",
                        name);
    return rc;
}

static int open_saved(dray__controller *self, dray__request *request, const char *name, int *out,
                      char **label, dray_error *error)
{
    char file[256];
    if (strcmp(name, DRAY__PASSED) == 0)
        return take_passed(request, false, out, label, error);
    int rc = check_saved(self, request, name, error);
    if (rc)
        return rc;
    snprintf(file, sizeof file, "checkpoint-%s", name);
    int fd = dray__open_beneath(self->folder_fd, file, O_RDONLY | O_NONBLOCK, 0);
    if (fd < 0 && errno == ENOENT)
        return dray__fail(error, DRAY_ENOENT, "checkpoint %s: there is none", name);
    if (fd < 0)
        return dray__fail_errno(error, errno, "checkpoint %s", name);
    if (asprintf(label, "checkpoint %s", name) < 0) {
        close(fd);
        return dray__nomem(error);
    }
    *out = fd;
    return DRAY_OK;
}

/* Creates a checkpoint's file. A queue writes one checkpoint at a time, so that no other one uses
 * its partial file. */
static int create_saved(dray__controller *self, const dray__ledger *ledger, const char *name,
                        dray__copy *copy, dray_error *error)
{
    const char *queue = ledger->table->name;
    copy->folder = self->folder_fd;
    if (asprintf(&copy->label, "checkpoint %s", name) < 0 ||
        asprintf(&copy->name, "checkpoint-%s", name) < 0 ||
        asprintf(&copy->partial, ".checkpoint-%016llx",
                 (unsigned long long)dray__hash(queue, strlen(queue))) < 0)
        return dray__nomem(error);
    copy->fd = dray__open_beneath(self->folder_fd, copy->partial, O_RDWR | O_CREAT, 0600);
    return copy->fd < 0 ? dray__fail_errno(error, errno, "%s", copy->label) : DRAY_OK;
}

int dray__durable_save(dray__controller *self, dray__ledger *ledger, const char *name,
                       dray__request *request, dray_error *error)
{
    bool passed = strcmp(name, DRAY__PASSED) == 0;
    int rc = passed ? DRAY_OK : check_saved(self, request, name, error);
    dray__copy *copy = rc ? NULL : calloc(1, sizeof *copy);
    if (!copy)
        return rc ? rc : dray__nomem(error);
    *copy = (dray__copy){.fd = -1, .folder = -1};
    rc = passed ? take_passed(request, true, &copy->fd, &copy->label, error)
                : create_saved(self, ledger, name, copy, error);
    if (!rc)
        return dray__ledger_copy(ledger, copy, error);
    dray__copy_free(copy);
    return rc;
}

/* Gives a journal its name, which must be free. */
static int name_journal(const char *partial, const char *path, dray_error *error)
{
    int code = access(path, F_OK) == 0 ? EEXIST : rename(partial, path) < 0 ? errno : 0;
    if (!code && dray__journal_sync_folder(path) < 0) {
        code = errno;
        unlink(path);
    }
    return code ? dray__fail_errno(error, code, "journal %s", path) : DRAY_OK;
}

static int copy_file(int from, const char *label, const char *to, int *out, dray_error *error)
{
    *out = open(to, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (*out < 0)
        return dray__fail_errno(error, errno, "journal %s", to);
    if (lseek(from, 0, SEEK_SET) < 0 || dray__copy_rest(from, *out) < 0)
        return dray__fail_errno(error, errno, "copying %s to %s", label, to);
    return fsync(*out) < 0 ? dray__fail_errno(error, errno, "journal %s", to) : DRAY_OK;
}

typedef struct restoring {
    dray__controller *controller;
    const dray__opening *opening;
    const char *path;
    char *partial; /* the copy that becomes the journal; NULL when there is none */
    bool named;
} restoring;

static int make_restored(void *user, dray__reader *opening, dray__table **out, dray_error *error)
{
    const restoring *r = user;
    return make_table(r->controller, opening, out, error);
}

/* Names the journal when the whole checkpoint was read and is the right one. A coordinator that is
 * killed before leaves a partial file, which the next one removes. Under the journal's own name,
 * the next one would go on with it. */
static int take_restored(void *user, const dray__table *table, dray_error *error)
{
    restoring *r = user;
    const dray__opening *o = r->opening;
    dray__settings wanted = o->settings;
    wanted.durability = 0; /* may differ from that of the checkpoint */
    int rc =
        strcmp(table->name, o->name) == 0
            ? dray__table_same(table, o->tasks, o->task_count, &wanted, error)
            : dray__fail(error, DRAY_EINVALID, "it is of queue %s, not %s", table->name, o->name);
    if (!rc && r->partial) {
        rc = name_journal(r->partial, r->path, error);
        r->named = rc == DRAY_OK;
    }
    return rc;
}

/* Makes the table of a checkpoint. path: of the journal that continues it, or NULL. */
static int restore_from(dray__controller *self, const dray__opening *o, int from, const char *label,
                        const char *path, dray__table **out, dray_error *error)
{
    restoring r = {.controller = self, .opening = o, .path = path};
    int copy = -1;
    dray__ledger_options options = {.path = path ? path : label,
                                    .keeper_path = self->keeper_path,
                                    .era = self->keepers.era,
                                    .sync = o->settings.durability == DRAY_DURABILITY_JOURNAL,
                                    .kept = path != NULL,
                                    .checkpoint = true,
                                    .from = path ? &copy : &from,
                                    .ready = take_restored};
    dray__table *table = NULL;
    if (path && asprintf(&r.partial, "%s.new", path) < 0)
        return dray__nomem(error);
    int rc = path ? copy_file(from, label, r.partial, &copy, error) : DRAY_OK;
    if (!rc && (rc = dray__ledger_recover(&options, make_restored, &r, &table, error)))
        dray__fail_prefix(error, rc, "%s: ", label);
    if (!rc && !table)
        rc = dray__fail(error, DRAY_EFORMAT, "%s is no queue's", label);
    if (copy >= 0)
        close(copy);
    if (rc && r.partial)
        unlink(r.named ? path : r.partial);
    free(r.partial);
    if (rc)
        return rc;
    table->settings.durability = o->settings.durability;
    *out = table;
    return DRAY_OK;
}

static int restore(dray__controller *self, const dray__opening *o, dray__request *request,
                   const char *path, dray__table **out, dray_error *error)
{
    int from;
    char *label;
    int rc = open_saved(self, request, o->restore, &from, &label, error);
    if (rc)
        return rc;
    rc = restore_from(self, o, from, label, path, out, error);
    close(from);
    free(label);
    return rc;
}

/* ---- queues ---------------------------------------------------------------------------------- */

static int begin_ledger(dray__controller *self, const dray__opening *o, dray__request *request,
                        const char *path, dray__table *table, dray_error *error)
{
    const dray__reader *opening = dray__request_payload(request);
    dray__ledger_options options = {.path = path,
                                    .keeper_path = self->keeper_path,
                                    .era = self->keepers.era,
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
        rc = restore(self, o, request, path, out, error);
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

static int recover_file(dray__controller *self, const char *path,
                        int (*serve)(dray__controller *, dray__table *, dray_error *),
                        dray_error *error)
{
    dray__ledger_options options = {.path = path,
                                    .keeper_path = self->keeper_path,
                                    .era = self->keepers.era,
                                    .sync = true,
                                    .kept = true};
    dray__table *table = NULL;
    int rc = dray__ledger_recover(&options, make_table, self, &table, error);
    if (rc)
        return rc;
    if (table) { /* it may continue a checkpoint from which the queue was opened */
        table->settings.durability = DRAY_DURABILITY_JOURNAL;
        rc = serve(self, table, error);
        return rc ? rc : dray__store_former(self, self->queues->table, error);
    }
    /* It lacks even the record of the queue's opening, so no client was told that the queue
     * exists. */
    dray__log(DRAY_LOG_INFO, "queue: journal %s holds nothing: removed", path);
    unlink(path);
    return DRAY_OK;
}

/* Locks the folder, which one coordinator at a time uses: each removes the partial files of all
 * others when it starts, and reads journals before it locks them. The lock is on a file, because
 * sockets may be in the folder, whose makers lock it for a moment (net/address.c). */
static int lock_folder(dray__controller *self, dray_error *error)
{
    self->folder_fd = open(self->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (self->folder_fd < 0)
        return dray__fail_errno(error, errno, "folder of journals %s", self->folder);
    self->lock_fd = dray__open_beneath(self->folder_fd, ".journals-lock", O_RDWR | O_CREAT, 0600);
    if (self->lock_fd >= 0 && flock(self->lock_fd, LOCK_EX | LOCK_NB) == 0)
        return DRAY_OK;
    return errno == EWOULDBLOCK
               ? dray__fail(error, DRAY_EBUSY, "folder of journals %s: another coordinator uses it",
                            self->folder)
               : dray__fail_errno(error, errno, "folder of journals %s: .journals-lock",
                                  self->folder);
}

int dray__durable_recover(dray__controller *self,
                          int (*serve)(dray__controller *, dray__table *, dray_error *),
                          dray_error *error)
{
    if (mkdir(self->folder, 0700) < 0 && errno != EEXIST)
        return dray__fail_errno(error, errno, "folder of journals %s", self->folder);
    const dray__stores_options stores = {.folder = self->folder};
    int rc = lock_folder(self, error);
    if (!rc)
        rc = dray__stores_new(&stores, &self->cleaned, error);
    if (rc)
        return rc;
    dray__keeper_link link;
    rc = dray__keeper_link_init(&link, self->keeper_path, DRAY__KEEPER_PATIENCE, error);
    link.era = self->keepers.era;
    if (!rc && self->keeper_path) /* the keeper's chunks are of an earlier controller */
        rc = dray__keeper_reset(&link, error);
    dray__keeper_link_free(&link);
    DIR *dir = rc ? NULL : opendir(self->folder);
    if (!rc && !dir)
        rc = dray__fail_errno(error, errno, "folder of journals %s", self->folder);
    for (struct dirent *entry; !rc && (entry = readdir(dir));) {
        char path[4096];
        if (strncmp(entry->d_name, ".checkpoint-", strlen(".checkpoint-")) == 0)
            unlinkat(self->folder_fd, entry->d_name, 0); /* it is incomplete */
        if (strncmp(entry->d_name, "queue-", 6) != 0)
            continue;
        if (snprintf(path, sizeof path, "%s/%s", self->folder, entry->d_name) >= (int)sizeof path)
            rc = dray__fail(error, DRAY_EINVALID, "folder of journals %s: too long", self->folder);
        else if (dray__ends_with(path, ".journal"))
            rc = recover_file(self, path, serve, error);
        else if (dray__ends_with(path, ".scratch") || dray__ends_with(path, ".new"))
            unlink(path);
    }
    if (dir)
        closedir(dir);
    return rc ? rc : dray__store_clean(self, error);
}
