/* src/cmd/study/: `dray study`.
 *
 * Shows the result of a study (study.json) as tables for a terminal, or as a page with pictures. */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

/* Prints the tables, as text or HTML, and then the runs that failed or diverged. */
void cmd_study_tables(const json_t *study, bool html, FILE *out);
/* Prints an SVG element: held-out accuracy by samples or wall time, with a line and a band for each
 * schedule. */
void cmd_study_plot(const json_t *study, bool by_seconds, FILE *out);
/* Prints a page that needs no other file. */
void cmd_study_page(const json_t *study, FILE *out);
/* Prints text, escaped for use between tags or in an attribute. */
void cmd_study_escape(const char *text, FILE *out);
