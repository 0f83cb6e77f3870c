/* Tests that `dray serve` and `dray keeper` can write only to their own folders once they serve. */
#include <fcntl.h>
#include <sys/stat.h>

#include "run/served.h"

#include "run/supervisor/coordinator.h"
#include "run/supervisor/sandbox.h"

static char folder[64], unix_path[96], journal[96], elsewhere[96], inside[128];
static int told;

FIXTURE(make_folder)
{
    strcpy(folder, "/tmp/dray-sandbox-XXXXXX");
    if (!getenv("DRAY_PROGRAM") || !mkdtemp(folder))
        return -1;
    snprintf(unix_path, sizeof unix_path, "%s/s", folder);
    snprintf(journal, sizeof journal, "%s/journal", folder);
    snprintf(inside, sizeof inside, "%s/file", journal);
    snprintf(elsewhere, sizeof elsewhere, "%s/elsewhere", folder);
    setenv("XDG_RUNTIME_DIR", folder, 1);
    return close(open(elsewhere, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
}

FIXTURE(remove_folder)
{
    unlink(elsewhere);
    rmdir(journal);
    return rmdir(folder);
}

/* errno's value of an attempt. */
static int try_open(const char *path, int flags)
{
    int fd = open(path, flags | O_CLOEXEC, 0600);
    int code = fd < 0 ? errno : 0;
    close(fd);
    return code;
}

static void try_all(void)
{
    char fresh[128];
    snprintf(fresh, sizeof fresh, "%s/new", folder);
    int found[] = {try_open(elsewhere, O_WRONLY),
                   try_open(elsewhere, O_WRONLY | O_TRUNC),
                   try_open(fresh, O_WRONLY | O_CREAT),
                   mkdir(fresh, 0700) ? errno : 0,
                   rename(elsewhere, fresh) ? errno : 0,
                   execl("/bin/true", "true", NULL) ? errno : 0,
                   try_open(elsewhere, O_RDONLY),
                   try_open(inside, O_RDWR | O_CREAT),
                   unlink(inside) ? errno : 0};
    _exit(write(told, found, sizeof found) == sizeof found ? 0 : 1);
}

enum { REFUSED = 6, ALLOWED = 3 };

static void serving(void *user, const char *unix_address, const char *tcp, const char *metrics)
{
    (void)user, (void)unix_address, (void)tcp, (void)metrics;
    try_all();
}

static void serve_all(void)
{
    dray__serve_options options = {
        .unix_path = unix_path, .journal = journal, .sandbox = true, .ready = serving};
    dray_error error;
    dray__serve(&options, &error);
    fprintf(stderr, "%s\n", error.message);
    _exit(2);
}

/* What was found by a server, when it served; it ends itself then. */
static void look(int found[REFUSED + ALLOWED])
{
    int ends[2], status;
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    told = ends[1];
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0)
        serve_all();
    close(ends[1]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_int_equal(read(ends[0], found, sizeof(int) * (REFUSED + ALLOWED)),
                     sizeof(int) * (REFUSED + ALLOWED));
    close(ends[0]);
    unlink(unix_path);
    char state[128];
    snprintf(state, sizeof state, "%s.state", unix_path);
    unlink(state);
}

TEST(a_server_writes_in_its_folders_alone)
{
    int found[REFUSED + ALLOWED];
    if (dray__sandbox_version() < 3) /* from then on truncating is refused, too */
        skip();
    look(found);
    for (int i = 0; i < REFUSED; i++)
        if (found[i] != EACCES)
            fail_msg("attempt %d: %s", i, strerror(found[i]));
    for (int i = REFUSED; i < REFUSED + ALLOWED; i++)
        if (found[i])
            fail_msg("attempt %d: %s", i, strerror(found[i]));
}

static bool restricted(pid_t pid)
{
    char path[64], line[256];
    int set = 0;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file))
        sscanf(line, "NoNewPrivs: %d", &set);
    if (file)
        fclose(file);
    return set == 1;
}

/* The program's servers are such ones, and serve as ever; and leave nothing behind. */
TEST(the_programs_servers_are_restricted)
{
    char unix_address[128], keeper_path[128];
    snprintf(unix_address, sizeof unix_address, "unix:%s", unix_path);
    snprintf(keeper_path, sizeof keeper_path, "%s/k", folder);
    const char *const server[] = {"dray",       "serve",    "--json",          "--listen",
                                  unix_address, "--listen", "tcp:127.0.0.1:0", "--journal",
                                  journal,      NULL};
    const char *const keeper[] = {"dray", "keeper", "--json", "--socket", keeper_path, NULL};
    bool has = dray__sandbox_version() > 0;
    served s = served_start(server, 0);
    setenv("DRAY_ADDRESS", served_says(&s, "tcp"), 1);
    setenv("DRAY_HOST", "another", 1);
    served k = served_start(keeper, 0);
    unsetenv("DRAY_HOST");
    bool both = restricted(s.pid) && restricted(k.pid);
    served_stop(&k);
    served_stop(&s);
    assert_int_equal(both, has);
    setenv("DRAY_SANDBOX", "off", 1);
    s = served_start(server, 0);
    unsetenv("DRAY_SANDBOX");
    bool free = !restricted(s.pid);
    served_stop(&s);
    assert_true(free);
}

SUITE(make_folder, remove_folder)
