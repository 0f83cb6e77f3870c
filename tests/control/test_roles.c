/* Tests the rights of each role's token. The table in docs/security.md has a line for each message.
 * It is tried message by message and role by role, at a coordinator with all its services. */
#include "control/fixture.h"
#include "control/relay.h"
#include "suite.h"

#include "control/channel.h"
#include "control/protocol.h"
#include "control/token.h"
#include "queue/server/controller.h"
#include "weights/registry/registry.h"

enum { ROLES = 4 };

static const char *const roles[ROLES] = {"trainer", "engine", "task", "tool"};
static coordinator_fixture f;
static dray__token master;

static int add_services(dray__coordinator *coordinator, dray_error *error)
{
    int rc = dray__registry_add(coordinator, error);
    if (!rc)
        rc = dray__leases_add(coordinator, error);
    if (!rc)
        rc = dray__relay_add(coordinator, error);
    return rc ? rc : dray__queue_add(coordinator, f.base, NULL, NULL, NULL, error);
}

FIXTURE(start)
{
    f.tcp = true;
    fixture_start(&f, add_services);
    master = fixture_master(&f);
    return 0;
}

FIXTURE(stop)
{
    fixture_stop(&f);
    return 0;
}

static const struct {
    uint16_t type;
    const char *name;
} messages[] = {
#define XX(name, value, who) {value, #name},
    DRAY__MESSAGE_MAP(XX)
#undef XX
};

enum { MESSAGES = sizeof messages / sizeof *messages };

/* ---- the table of the documentation ---------------------------------------------------------- */

static bool granted[MESSAGES][ROLES];
static int lines_of[MESSAGES];

static void read_message(const char *name, size_t size, const bool may[ROLES])
{
    for (size_t i = 0; i < MESSAGES; i++) {
        if (strlen(messages[i].name) != size || strncmp(messages[i].name, name, size) != 0)
            continue;
        memcpy(granted[i], may, sizeof granted[i]);
        lines_of[i]++;
        return;
    }
    fail_msg("docs/security.md: there is no message %.*s", (int)size, name);
}

/* "| `PING` `STATUS` | yes | yes | | yes | what they do |" */
static void read_line(char *line)
{
    bool may[ROLES];
    char *cells[ROLES + 2], *rest = line + 1;
    for (int i = 0; i < ROLES + 2; i++)
        cells[i] = strsep(&rest, "|");
    assert_non_null(cells[ROLES + 1]);
    for (int i = 0; i < ROLES; i++) {
        may[i] = strcmp(cells[i + 1], " yes ") == 0;
        if (!may[i] && strspn(cells[i + 1], " ") != strlen(cells[i + 1]))
            fail_msg("docs/security.md: 'yes' or nothing expected, found '%s'", cells[i + 1]);
    }
    for (char *at = strchr(cells[0], '`'); at; at = strchr(at + 1, '`')) {
        char *end = strchr(at + 1, '`');
        assert_non_null(end);
        read_message(at + 1, (size_t)(end - at - 1), may);
        at = end;
    }
}

static bool read_table(void)
{
    const char *source = getenv("DRAY_SOURCE_DIR");
    char path[512], *line = NULL;
    size_t capacity = 0;
    bool inside = false;
    snprintf(path, sizeof path, "%.480s/docs/security.md", source ? source : ".");
    FILE *file = fopen(path, "r");
    while (file && getline(&line, &capacity, file) > 0) {
        bool row = *line == '|';
        if (strncmp(line, "| messages | trainer | engine | task | tool |", 45) == 0)
            inside = true;
        else if (inside && row && strncmp(line, "| ---", 5) != 0)
            read_line(line);
        else if (inside && !row)
            break;
    }
    free(line);
    if (file)
        fclose(file);
    return inside;
}

/* ---- what happens ---------------------------------------------------------------------------- */

static dray_context *open_as(const char *role)
{
    dray__token token;
    char text[DRAY__TOKEN_TEXT];
    token = master;
    if (strcmp(role, "master") != 0)
        assert_int_equal(dray__token_derive(&master, role, &token, NULL), DRAY_OK);
    setenv("DRAY_TOKEN", dray__token_print(&token, text), 1);
    return fixture_open_at(f.tcp_address, role, NULL, 0);
}

/* An empty message: of a right role it is malformed at the most. */
static bool is_let_through(dray_context *context, uint16_t type)
{
    dray__channel *channel;
    dray_error error = {0};
    assert_int_equal(dray__channel_open(context, &channel, NULL), DRAY_OK);
    int rc =
        dray__call(channel, type, NULL, NULL, 0, dray__deadline(20 * DRAY__SECOND), NULL, &error);
    dray__channel_close(channel);
    if (rc == DRAY_ETIMEDOUT || rc == DRAY_ECLOSED)
        fail_msg("%s: %s", dray__message_name(type), error.message);
    bool elsewhere = rc == DRAY_EUNSUPPORTED && strstr(error.message, "not served here");
    return !elsewhere && (rc != DRAY_EPERM || !strstr(error.message, "may not send it"));
}

TEST(roles_do_what_the_table_says)
{
    int wrong = 0;
    if (!read_table())
        fail_msg("docs/security.md ($DRAY_SOURCE_DIR): no table of messages and roles");
    for (size_t i = 0; i < MESSAGES; i++) {
        if (lines_of[i] == 1)
            continue;
        fprintf(stderr, "%s: one line of docs/security.md expected, found %d\n", messages[i].name,
                lines_of[i]);
        wrong++;
    }
    for (int r = 0; r < ROLES; r++) {
        dray_context *context = open_as(roles[r]);
        for (size_t i = 0; i < MESSAGES; i++) {
            bool found = is_let_through(context, messages[i].type);
            if (found == granted[i][r])
                continue;
            fprintf(stderr, "%s: docs/security.md says that a %s may%s send it, and it may%s\n",
                    messages[i].name, roles[r], granted[i][r] ? "" : " not", found ? "" : " not");
            wrong++;
        }
        dray_close(context);
        unsetenv("DRAY_TOKEN");
    }
    assert_int_equal(wrong, 0);
}

static int join_as_own(const char *role, dray_error *error)
{
    dray__channel *channel;
    dray__writer w = {0};
    dray_context *context = open_as(role);
    assert_int_equal(dray__channel_open(context, &channel, NULL), DRAY_OK);
    dray__put_string(&w, "/tmp/keeper");
    dray__put_string(&w, "tcp:127.0.0.1:1");
    dray__put_u8(&w, 1);
    int rc = dray__call(channel, DRAY__MSG_QUEUE_KEEPER_JOIN, &w, NULL, 0,
                        dray__deadline(20 * DRAY__SECOND), NULL, error);
    dray__writer_free(&w);
    dray__channel_close(channel);
    dray_close(context);
    unsetenv("DRAY_TOKEN");
    return rc;
}

/* Chunks of number 0 are the coordinator's own keeper's: its host alone has the master token. */
TEST(keeper_of_the_coordinator)
{
    dray_error error = {0};
    (void)state;
    assert_int_equal(join_as_own("task", &error), DRAY_EPERM);
    assert_non_null(strstr(error.message, "the coordinator's own"));
    assert_int_equal(join_as_own("master", &error), DRAY_OK);
}

SUITE(start, stop)
