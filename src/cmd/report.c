/* dray report: the page that shows a run, or several side by side. */
#include "cmd/cmd.h"
#include "run/page/page.h"

#include <stdlib.h>
#include <string.h>

typedef struct arguments {
    cmd_list folders;
    const char *out;
    bool json;
} arguments;

int cmd_report(int argc, char **argv)
{
    static const cmd_option options[] = {
        CMD_TEXT(arguments, out, "out", 'o', "FILE",
                 "The page. Default: report.html in DIR, or of several here"),
        CMD_JSON(arguments, json), CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .arguments = "DIR [DIR...]",
        .words = "folders of runs, at most 16",
        .words_at = offsetof(arguments, folders),
        .least = 1,
        .most = DRAY__PAGE_RUNS,
        .doc =
            "Writes a page for the browser, one file that needs no other, of a run or of several "
            "side by side: reward and held-out accuracy, length, staleness, throughput, where "
            "the time of each role goes, the queue, versions and updates of the engines, what "
            "was started anew or lost, settings, and the timeline.\vdray run writes the page of "
            "its run when it ends."};
    arguments a = {0};
    cmd_parse(&usage, argc, argv, &a);
    char *path = NULL;
    dray_error error;
    bool inside = !a.out && a.folders.count == 1;
    if (asprintf(&path, "%s%s", inside ? a.folders.items[0] : "",
                 a.out    ? a.out
                 : inside ? "/report.html"
                          : "report.html") < 0)
        return cmd_failf("report", "out of memory");
    int status = CMD_OK;
    if (dray__page_write_file(a.folders.items, a.folders.count, path, &error))
        status = cmd_fail("report", &error);
    else if (a.json)
        cmd_json_line(json_pack("{s:s, s:i}", "page", path, "runs", (int)a.folders.count));
    else
        printf("%s\n", path);
    free(path);
    return status;
}
