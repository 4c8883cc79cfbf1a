package e2e

import (
	"fmt"
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

// A hundred reloads within a minute under load: no request fails, no budget is
// renewed, and nothing grows.
//
// At a reload Caddy closes connections that wait for their next request, and
// resets those that nobody has accepted yet, with edge_limit and without. HTTP
// clients send a request again that got no answer for that (RFC 9112, section
// 9.3.1); net/http does for reused connections, and this test for new ones, once
// a reload at most. wrk does not, and counts an error: about one for each of its
// connections and reload, and at most two, for a connection that it makes again
// can still be one that nobody accepts. (A Caddy without edge_limit had 481 in 60
// reloads with 8 connections, on a busy machine.)
func TestSoak(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	wrk := tool(t, "wrk")
	addr := freeAddr(t)
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
			respond ok`)
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

	const reloads, connections = 100, 8
	seconds := 60
	if testing.Short() {
		seconds = 10
	}
	load := exec.Command(wrk, "-t1", "-c"+strconv.Itoa(connections), "-d"+strconv.Itoa(seconds)+"s", "http://"+addr+"/")
	var output strings.Builder
	load.Stdout, load.Stderr = &output, &output
	if err := load.Start(); err != nil {
		t.Fatal(err)
	}
	stop, careful := make(chan struct{}), make(chan int)
	go func() {
		answered, again := 0, 0
		defer func() {
			t.Logf("%d requests were answered, %d had to be sent again", answered, again)
			careful <- answered
		}()
		others := clientFrom(t, "127.0.0.6")
		for {
			select {
			case <-stop:
				return
			default:
			}
			response, err := (&http.Client{Transport: others, Timeout: patience}).Get("http://" + addr + "/")
			if err != nil && again < reloads {
				again++
				continue
			}
			if err != nil || response.StatusCode != http.StatusOK {
				t.Errorf("request %d failed: %v", answered, err)
				return
			}
			_, _ = io.Copy(io.Discard, response.Body)
			response.Body.Close()
			answered++
		}
	}()
	var served float64
	for n := range reloads {
		begin := time.Now()
		if status := c.load(t, c.caddyfile("", sites(n))); status != http.StatusOK {
			t.Fatalf("reload %d got %d", n, status)
		}
		if n%10 == 0 {
			getAgain(t, client, "http://"+addr+"/narrow").wantDenied(t, 24*time.Hour)
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
	close(stop)
	if answered := <-careful; answered < 1000 {
		t.Errorf("only %d requests were answered", answered)
	}
	text := output.String()
	var connect, read, write, timeout int
	if at := strings.Index(text, "Socket errors:"); at >= 0 {
		if _, err := fmt.Sscanf(text[at:], "Socket errors: connect %d, read %d, write %d, timeout %d", &connect, &read, &write, &timeout); err != nil {
			t.Fatal(err)
		}
	}
	if strings.Contains(text, "Non-2xx") || connect+timeout > 0 || read+write > 2*connections*reloads {
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
