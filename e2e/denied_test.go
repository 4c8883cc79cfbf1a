package e2e

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// A denied client may still be about to send its body, or wait to be asked for
// it. The answer must not wait for that.
func TestDeniedWithABodyNotSent(t *testing.T) {
	needLoopbackNetwork(t)
	for _, row := range []struct{ name, why, headers string }{
		{"asks first", "the client sends nothing until it is told to", "Content-Length: 1024\r\nExpect: 100-continue\r\n"},
		{"1 KB", "so little would be read to the end before the answer", "Content-Length: 1024\r\n"},
		{"300 KB", "so much would not be read to the end", "Content-Length: 307200\r\n"},
		{"300 KB, asks first", "the same, with nothing on its way", "Content-Length: 307200\r\nExpect: 100-continue\r\n"},
		{"no length", "nobody knows how much would come", "Transfer-Encoding: chunked\r\n"},
	} {
		for _, errorRoutes := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, error routes %t", row.name, errorRoutes), func(t *testing.T) {
				t.Parallel()
				app, addr := startUpstream(t), freeAddr(t)
				sites := site(addr, "edge_limit {\n client connection\n limit per_client 1/h\n}\nreverse_proxy "+app.addr)
				if errorRoutes {
					sites = strings.TrimSuffix(sites, "}\n") + "handle_errors {\nrespond {err.status_code} {err.status_code}\n}\n}\n"
				}
				startCaddy(t, "", sites)
				get(t, clientFrom(t, "127.0.0.5"), "http://"+addr).wantClient(t, "127.0.0.5")

				conn, reader := dialRaw(t, "127.0.0.5", addr)
				begin := time.Now()
				if _, err := io.WriteString(conn, "POST / HTTP/1.1\r\nHost: test\r\n"+row.headers+"\r\n"); err != nil {
					t.Fatal(err)
				}
				response, err := http.ReadResponse(reader, nil)
				if err != nil {
					t.Fatalf("no answer after %v: %v (%s)", time.Since(begin), err, row.why)
				}
				readAll(t, response)
				if response.StatusCode != http.StatusTooManyRequests || response.Header.Get("Retry-After") == "" || !response.Close {
					t.Errorf("status %d, Retry-After %q, Connection: close %t, want 429 with both",
						response.StatusCode, response.Header.Get("Retry-After"), response.Close)
				}
				if got := app.requests.Load(); got != 1 {
					t.Errorf("%d requests came through, want 1", got)
				}
				if !errorRoutes { // which may still want the body
					if _, err := reader.ReadByte(); err != io.EOF {
						t.Errorf("a client that never sends its body keeps the connection: %v", err)
					}
				}
			})
		}
	}
}

// On HTTP/2 a connection carries the requests of many, so a denial ends its own
// stream only.
func TestDeniedWithABodyNotSentOverHTTP2(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	app, addr := startUpstream(t), freeAddr(t)
	startCaddy(t, "", tlsSite(addr, `
		edge_limit /limited {
			client connection
			limit per_client 1/h
		}
		reverse_proxy `+app.addr+` {
			flush_interval -1
		}`))
	conn := connection2(t, "127.0.0.5", addr)
	url := "https://localhost:" + portOf(addr)

	finish := app.getSlowly(t, conn, url)
	if a := get(t, conn, url+"/limited"); a.status != http.StatusOK {
		t.Fatalf("the first limited request: status %d", a.status)
	}

	for n := range 20 {
		body, sender := io.Pipe() // nothing ever comes
		r := request(t, url+"/limited")
		r.Method, r.Body, r.ContentLength = http.MethodPost, body, 300<<10
		a := do(t, conn, r)
		sender.Close()
		a.wantDenied(t, time.Hour)
		if connection := a.header.Values("Connection"); len(connection) > 0 {
			t.Errorf("HTTP/2 has no Connection header, got %q", connection)
		}
		if a := get(t, conn, url+"/"); a.status != http.StatusOK {
			t.Fatalf("after %d denials another request of the connection got %d", n+1, a.status)
		}
	}
	finish() // the stream that was open all the time
}
