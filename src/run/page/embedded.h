/* page.html as the build embeds it (cmake/embed.cmake), ended by a zero. */
#pragma once

extern const unsigned char dray__page_html[];
extern const unsigned long dray__page_html_size;
