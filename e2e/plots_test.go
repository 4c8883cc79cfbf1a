package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"testing"
	"time"
)

// plotPanels draws what the dashboard's queries found in a run, with gnuplot, into
// the directory that PLOTS names. The pictures in docs/monitoring are made so:
//
//	PLOTS=$PWD/docs/monitoring go test ./e2e -run TestPrometheus -count 1
func plotPanels(t *testing.T, web string, begin time.Time) {
	t.Helper()
	dir := os.Getenv("PLOTS")
	if dir == "" {
		return
	}
	var script strings.Builder
	script.WriteString("set terminal svg size 900,1800 font 'sans-serif,11' background '#ffffff'\n")
	fmt.Fprintf(&script, "set output %q\nset multiplot layout 6,2\nset xlabel 'seconds'\nset yrange [0:*]\nset key outside below\nset grid\n", filepath.Join(dir, "dashboard.svg"))
	for _, panel := range dashboardPanels(t) {
		fmt.Fprintf(&script, "set title %q\n", panel.Title)
		var plots []string
		for name, values := range queryRange(t, web, dashboardQuery(panel.Targets[0].Expr), begin) {
			block := fmt.Sprintf("$d%d", strings.Count(script.String(), "<<"))
			fmt.Fprintf(&script, "%s <<EOD\n%sEOD\n", block, values)
			plots = append(plots, fmt.Sprintf("%s using 1:2 with lines title %q noenhanced", block, name))
		}
		sort.Strings(plots)
		fmt.Fprintf(&script, "plot %s\n", strings.Join(plots, ", "))
	}
	cmd := exec.Command(tool(t, "gnuplot"))
	cmd.Stdin = strings.NewReader(script.String())
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("gnuplot: %v\n%s", err, output)
	}
}

// queryRange returns the series that a query finds since begin, as lines of a time
// in seconds and a value.
func queryRange(t *testing.T, web, expression string, begin time.Time) map[string]string {
	t.Helper()
	response, err := http.Get("http://" + web + "/api/v1/query_range?" + url.Values{
		"query": {expression}, "step": {"1"},
		"start": {fmt.Sprint(begin.Unix())}, "end": {fmt.Sprint(time.Now().Unix())},
	}.Encode())
	if err != nil {
		t.Fatal(err)
	}
	var answer struct {
		Data struct {
			Result []struct {
				Metric map[string]string
				Values [][2]any
			}
		}
	}
	if err := json.Unmarshal(readAll(t, response), &answer); err != nil {
		t.Fatal(err)
	}
	series := make(map[string]string)
	for _, result := range answer.Data.Result {
		var labels []string
		for _, label := range []string{"name", "source", "reason", "indebted", "state", "kind"} {
			if value := result.Metric[label]; value != "" {
				labels = append(labels, value)
			}
		}
		var lines strings.Builder
		for _, value := range result.Values {
			fmt.Fprintf(&lines, "%v %v\n", value[0].(float64)-float64(begin.Unix()), value[1])
		}
		series[strings.Join(labels, " ")] = lines.String()
	}
	return series
}

// dashboardQuery puts values in the place of the dashboard's variables.
func dashboardQuery(expression string) string {
	return strings.NewReplacer("$__rate_interval", "10s", "$instance", ".*").Replace(expression)
}
