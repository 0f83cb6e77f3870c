/* A client's side of checkpoints. A name with a '/' is a path, which is opened here with the rights
 * of this process, and the coordinator gets the descriptor. Any other name is a file in the
 * coordinator's folder. */
#include "base/error.h"
#include "queue/client/client.h"
#include "queue/journal/journal_inside.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

int dray__queue_check_passing(const dray_queue *queue, dray_error *error)
{
    if (queue->passed < 0 || dray__channel_passes_fds(queue->channel))
        return DRAY_OK;
    return dray__fail(error, DRAY_EUNSUPPORTED,
                      "queue %s: a file of this host cannot be passed to a coordinator over TCP: "
                      "a checkpoint's name expected, of one in the coordinator's folder",
                      queue->name);
}

int dray__queue_open_saved(dray_queue *queue, const char *restore, const char **name,
                           dray_error *error)
{
    *name = restore ? restore : "";
    if (!**name)
        return DRAY_OK;
    if (!strchr(restore, '/'))
        return dray__saved_name_check(restore, error);
    *name = DRAY__PASSED;
    if (queue->passed < 0) /* else it is open from an earlier attempt */
        queue->passed = open(restore, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    return queue->passed < 0 ? dray__fail_errno(error, errno, "checkpoint %s", restore) : DRAY_OK;
}

void dray__queue_close_saved(dray_queue *queue)
{
    if (queue->passed >= 0)
        close(queue->passed);
    queue->passed = -1;
}

/* Opens and locks the partial file, because two processes that save to the same path would write
 * into each other's file. */
static int open_partial(const char *partial, int *out, dray_error *error)
{
    struct stat ours, there;
    int fd = open(partial, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    if (fd < 0)
        return dray__fail_errno(error, errno, "checkpoint %s", partial);
    if (flock(fd, LOCK_EX | LOCK_NB) < 0 || fstat(fd, &ours) < 0 || stat(partial, &there) < 0 ||
        ours.st_dev != there.st_dev || ours.st_ino != there.st_ino) {
        close(fd);
        return dray__fail(error, DRAY_EBUSY, "checkpoint %s: another process writes it", partial);
    }
    *out = fd;
    return DRAY_OK;
}

static int save(dray_queue *queue, const char *name, dray_error *error)
{
    const dray__saving saving = {name};
    return dray__queue_command(queue, DRAY__MSG_QUEUE_CHECKPOINT, &dray__saving_fields, &saving,
                               NULL, error);
}

static int save_at(dray_queue *queue, const char *path, dray_error *error)
{
    char *partial;
    if (asprintf(&partial, "%s.new", path) < 0)
        return dray__nomem(error);
    int rc = open_partial(partial, &queue->passed, error);
    if (!rc) {
        rc = dray__queue_check_passing(queue, error);
        if (!rc)
            rc = save(queue, DRAY__PASSED, error);
        if (!rc && (rename(partial, path) < 0 || dray__journal_sync_folder(path) < 0))
            rc = dray__fail_errno(error, errno, "checkpoint %s", path);
        if (rc)
            unlink(partial);
    }
    dray__queue_close_saved(queue);
    free(partial);
    return rc;
}

int dray_queue_checkpoint(dray_queue *queue, const char *file, dray_error *error)
{
    if (!file)
        return dray__fail(error, DRAY_EINVALID, "dray_queue_checkpoint: a file expected");
    if (strchr(file, '/'))
        return save_at(queue, file, error);
    int rc = dray__saved_name_check(file, error);
    return rc ? rc : save(queue, file, error);
}
