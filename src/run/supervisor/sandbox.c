#include "run/supervisor/sandbox.h"

#include "base/error.h"
#include "base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <linux/landlock.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef LANDLOCK_ACCESS_FS_REFER
#define LANDLOCK_ACCESS_FS_REFER (1ULL << 13) /* version 2, Linux 5.19 */
#endif
#ifndef LANDLOCK_ACCESS_FS_TRUNCATE
#define LANDLOCK_ACCESS_FS_TRUNCATE (1ULL << 14) /* version 3, Linux 6.2 */
#endif

static const uint64_t write_file = LANDLOCK_ACCESS_FS_WRITE_FILE | LANDLOCK_ACCESS_FS_TRUNCATE;
static const uint64_t change = LANDLOCK_ACCESS_FS_WRITE_FILE | LANDLOCK_ACCESS_FS_TRUNCATE |
                               LANDLOCK_ACCESS_FS_REMOVE_DIR | LANDLOCK_ACCESS_FS_REMOVE_FILE |
                               LANDLOCK_ACCESS_FS_MAKE_DIR | LANDLOCK_ACCESS_FS_MAKE_REG;
static const uint64_t serve = LANDLOCK_ACCESS_FS_MAKE_SOCK | LANDLOCK_ACCESS_FS_REMOVE_FILE;
/* The rights that are refused unless a rule allows them. */
static const uint64_t refused =
    LANDLOCK_ACCESS_FS_EXECUTE | LANDLOCK_ACCESS_FS_WRITE_FILE | LANDLOCK_ACCESS_FS_TRUNCATE |
    LANDLOCK_ACCESS_FS_REMOVE_DIR | LANDLOCK_ACCESS_FS_REMOVE_FILE | LANDLOCK_ACCESS_FS_MAKE_CHAR |
    LANDLOCK_ACCESS_FS_MAKE_DIR | LANDLOCK_ACCESS_FS_MAKE_REG | LANDLOCK_ACCESS_FS_MAKE_SOCK |
    LANDLOCK_ACCESS_FS_MAKE_FIFO | LANDLOCK_ACCESS_FS_MAKE_BLOCK | LANDLOCK_ACCESS_FS_MAKE_SYM |
    LANDLOCK_ACCESS_FS_REFER;

int dray__sandbox_version(void)
{
    long version = syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION);
    return version > 0 ? (int)version : 0;
}

static uint64_t known(int version)
{
    uint64_t mask = refused;
    if (version < 2)
        mask &= ~LANDLOCK_ACCESS_FS_REFER;
    if (version < 3)
        mask &= ~LANDLOCK_ACCESS_FS_TRUNCATE;
    return mask;
}

/* With `must`, it is an error when the file does not exist. */
static int allow(int rules, uint64_t what, const char *path, bool must, dray_error *error)
{
    struct landlock_path_beneath_attr rule = {.allowed_access = what};
    rule.parent_fd = open(path, O_PATH | O_CLOEXEC);
    if (rule.parent_fd < 0)
        return must ? dray__fail_errno(error, errno, "%s", path) : DRAY_OK;
    int rc = DRAY_OK;
    if (syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &rule, 0))
        rc = dray__fail_errno(error, errno, "a rule of Landlock for %s", path);
    close(rule.parent_fd);
    return rc;
}

static int allow_folder_of(int rules, uint64_t what, const char *path, dray_error *error)
{
    char *copy = strdup(path);
    int rc = copy ? allow(rules, what, dirname(copy), true, error) : dray__nomem(error);
    free(copy);
    return rc;
}

static int add_rules(int rules, uint64_t mask, const char *work, const char *const *sockets,
                     size_t count, dray_error *error)
{
    /* Files that libraries open for writing: devices for one-sided reads, and /dev/null. */
    static const char *const devices[] = {"/dev/null", "/dev/infiniband"};
    int rc = DRAY_OK;
    if (work && mkdir(work, 0700) < 0 && errno != EEXIST)
        return dray__fail_errno(error, errno, "%s", work);
    if (work)
        rc = allow(rules, change & mask, work, true, error);
    for (size_t i = 0; i < count && !rc; i++)
        if (sockets[i])
            rc = allow_folder_of(rules, serve & mask, sockets[i], error);
    for (size_t i = 0; i < sizeof devices / sizeof *devices && !rc; i++)
        rc = allow(rules, write_file & mask, devices[i], false, error);
    return rc;
}

int dray__sandbox(const char *work, const char *const *sockets, size_t count, dray_error *error)
{
    const char *wish = getenv("DRAY_SANDBOX");
    bool off = wish && strcmp(wish, "off") == 0;
    int version = off ? 0 : dray__sandbox_version();
    if (!version) {
        dray__log(DRAY_LOG_INFO, "no sandbox: %s",
                  off ? "$DRAY_SANDBOX is off" : "this kernel has no Landlock (Linux 5.13)");
        return DRAY_OK;
    }
    uint64_t mask = known(version);
    struct landlock_ruleset_attr attributes = {.handled_access_fs = mask};
    int rules = (int)syscall(SYS_landlock_create_ruleset, &attributes, sizeof attributes, 0);
    if (rules < 0)
        return dray__fail_errno(error, errno, "Landlock");
    int rc = add_rules(rules, mask, work, sockets, count, error);
    if (!rc &&
        (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_landlock_restrict_self, rules, 0)))
        rc = dray__fail_errno(error, errno, "Landlock");
    close(rules);
    if (!rc)
        dray__log(DRAY_LOG_INFO, "Landlock, version %d: nothing is written but in %s", version,
                  work ? work : "the folders of sockets");
    return rc;
}
