package e2e

import (
	"io"
	"math/rand/v2"
	"net/http"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A hundred reloads within a minute under load: no request is lost, no budget is
// renewed, and nothing grows.
func TestSoak(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	wrk := tool(t, "wrk")
	app, addr := startUpstream(t), freeAddr(t)
	sites := func(n int) string {
		return site(addr, `
			edge_limit {
				client connection
				limit wide 1000000/s
				limit narrow 3/1d {
					match /narrow
				}
				ceiling all 1000000/s
				in_flight busy 1000
			}
			header X-Generation `+strconv.Itoa(n)+`
			reverse_proxy `+app.addr)
	}
	c := startCaddy(t, "", sites(0))
	client := clientFrom(t, "127.0.0.5")
	for range 3 {
		get(t, client, "http://"+addr+"/narrow")
	}
	// let Caddy reach its usual size first
	for n := range 5 {
		c.load(t, c.caddyfile("", sites(1000+n)))
	}
	series := regexp.MustCompile(`(?m)^caddy_edge_limit_[a-z_]+\{`)
	seriesBefore := len(series.FindAllString(c.metrics(t), -1))
	goroutines, heap := c.footprint(t)

	const reloads = 100
	seconds := 60
	if testing.Short() {
		seconds = 10
	}
	load := exec.Command(wrk, "-t1", "-c8", "-d"+strconv.Itoa(seconds)+"s", "http://"+addr+"/")
	var output strings.Builder
	load.Stdout, load.Stderr = &output, &output
	if err := load.Start(); err != nil {
		t.Fatal(err)
	}
	var served float64
	for n := range reloads {
		begin := time.Now()
		if status := c.load(t, c.caddyfile("", sites(n))); status != http.StatusOK {
			t.Fatalf("reload %d got %d", n, status)
		}
		if n%10 == 0 {
			get(t, client, "http://"+addr+"/narrow").wantDenied(t, 24*time.Hour)
			now := c.metric(t, `caddy_edge_limit_requests_total{name="wide",outcome="allowed"}`)
			if now < served {
				t.Errorf("a counter went back from %v to %v", served, now)
			}
			served = now
		}
		pause := time.Duration(seconds)*time.Second/reloads - time.Since(begin)
		time.Sleep(max(0, pause-time.Duration(rand.IntN(20))*time.Millisecond))
	}
	if err := load.Wait(); err != nil {
		t.Fatalf("wrk: %v: %s", err, output.String())
	}
	if text := output.String(); strings.Contains(text, "Non-2xx") || strings.Contains(text, "Socket errors") {
		t.Errorf("requests were lost:\n%s", text)
	}
	if served < 1000 {
		t.Errorf("only %v requests were served", served)
	}
	c.await(t, func() bool {
		client.CloseIdleConnections()
		now, _ := c.footprint(t)
		return now <= goroutines+20
	})
	goroutinesAfter, heapAfter := c.footprint(t)
	seriesAfter := len(series.FindAllString(c.metrics(t), -1))
	t.Logf("goroutines %v -> %v, heap %.1f -> %.1f MiB, series %d -> %d\n%s", goroutines, goroutinesAfter, heap, heapAfter, seriesBefore, seriesAfter, output.String())
	if heapAfter > heap*1.5+20 {
		t.Errorf("the heap grew from %.1f to %.1f MiB", heap, heapAfter)
	}
	if seriesAfter != seriesBefore {
		t.Errorf("%d series became %d", seriesBefore, seriesAfter)
	}
}

// footprint is the number of goroutines, and the heap in use after a collection,
// in MiB.
func (c *caddy) footprint(t *testing.T) (goroutines, heap float64) {
	t.Helper()
	response, err := http.Get("http://" + c.admin + "/debug/pprof/heap?gc=1")
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, response.Body)
	response.Body.Close()
	return c.metric(t, "go_goroutines"), c.metric(t, "go_memstats_heap_inuse_bytes") / (1 << 20)
}
