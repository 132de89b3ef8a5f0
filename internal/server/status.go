package server

import (
	"fmt"
	"html/template"
	"net/http"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
)

// maxStatusRows bounds each table of the status page.
const maxStatusRows = 200

// statusPage is what a person sees who opens the HTTP port in a browser. It shows no
// key, no secret and no content.
type statusPage struct {
	Name, ServerID, Epoch, Control, Hot, State string
	Incarnation                                uint32
	Objects                                    uint64
	Namespaces, Regions, Waiting               int
	Pools                                      []statusPool
	Sessions                                   []statusSession
	More                                       int
	Now                                        string
}

type statusPool struct {
	Name, Medium, Capacity, Granted, Ready, Retiring, Quarantined, Kept string
	Objects, Leases                                                     uint64
}

type statusSession struct {
	ID, Engine, Instance, Role, State string
	Epoch                             uint32
	Leases, Regions                   int
	Provable                          bool
}

var statusTemplate = template.Must(template.New("status").Parse(`<!doctype html><html lang="en"><head><meta charset="utf-8">
<title>maru-server {{.Name}}</title><style>
body{font:14px system-ui,sans-serif;margin:2em;color:#222}table{border-collapse:collapse;margin:1em 0}
td,th{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:left}td.n{text-align:right}</style></head><body>
<h1>maru-server {{.Name}}</h1>
<p>{{.State}}. Server id {{.ServerID}}, epoch {{.Epoch}}, owner incarnation {{.Incarnation}}. Control {{.Control}}, hot {{.Hot}}.</p>
<p>{{.Objects}} objects in {{.Namespaces}} namespaces and {{.Regions}} regions{{if .Waiting}}; {{.Waiting}} regions of before the restart wait for their holders{{end}}.</p>
<table><tr><th>pool</th><th>medium</th><th>capacity</th><th>granted</th><th>ready</th><th>retiring</th><th>quarantined</th><th>kept</th><th>objects</th><th>leases</th></tr>
{{range .Pools}}<tr><td>{{.Name}}</td><td>{{.Medium}}</td><td class="n">{{.Capacity}}</td><td class="n">{{.Granted}}</td><td class="n">{{.Ready}}</td><td class="n">{{.Retiring}}</td><td class="n">{{.Quarantined}}</td><td class="n">{{.Kept}}</td><td class="n">{{.Objects}}</td><td class="n">{{.Leases}}</td></tr>
{{end}}</table>
<table><tr><th>session</th><th>instance</th><th>engine</th><th>role</th><th>state</th><th>epoch</th><th>regions</th><th>leases</th><th>end can be proved</th></tr>
{{range .Sessions}}<tr><td>{{.ID}}</td><td>{{.Instance}}</td><td>{{.Engine}}</td><td>{{.Role}}</td><td>{{.State}}</td><td class="n">{{.Epoch}}</td><td class="n">{{.Regions}}</td><td class="n">{{.Leases}}</td><td>{{if .Provable}}yes{{else}}no{{end}}</td></tr>
{{end}}</table>{{if .More}}<p>and {{.More}} rows more: maru usage shows all.</p>{{end}}
<p>{{.Now}} &middot; <a href="/metrics">metrics</a> &middot; <a href="/readyz">readyz</a></p></body></html>
`))

func (s *Server) serveStatus(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
	if err := statusTemplate.Execute(w, s.status()); err != nil {
		s.log.Debug("status page", "error", err) // the browser went away
	}
}

func (s *Server) status() *statusPage {
	u := s.usage()
	incarnation, _ := s.rm.status()
	state := "Ready"
	if degraded, err := s.Ready(); err != nil {
		state = "Not serving: " + err.Error()
	} else if degraded != "" {
		state = "Degraded: " + degraded
	}
	p := &statusPage{
		Name: s.state.name, ServerID: s.state.server.String(), Epoch: fmt.Sprintf("%016x", uint64(s.epoch)),
		Control: s.ControlAddress(), Hot: s.HotAddress(), State: state, Incarnation: uint32(incarnation),
		Objects: u.Objects, Namespaces: u.Namespaces, Regions: u.Regions, Waiting: u.Waiting,
		Now: time.Now().UTC().Format(time.RFC3339),
	}
	for i := range u.Pools {
		if i == maxStatusRows {
			p.More += len(u.Pools) - i
			break
		}
		p.Pools = append(p.Pools, s.statusPool(&u.Pools[i]))
	}
	for i := range u.Sessions {
		if i == maxStatusRows {
			p.More += len(u.Sessions) - i
			break
		}
		x := &u.Sessions[i]
		p.Sessions = append(p.Sessions, statusSession{
			ID: x.Session.String(), Engine: x.EngineID, Instance: x.Instance, Role: x.Role.String(), State: x.State.String(),
			Epoch: uint32(x.Epoch), Leases: x.Leases, Regions: x.Regions, Provable: x.Provable,
		})
	}
	return p
}

func (s *Server) statusPool(u *directory.PoolUsage) statusPool {
	name := s.describePool(&u.Grant.Pool, u.Grant.Private).GetName()
	if u.Session != (base.SessionID{}) {
		name += " of " + u.Session.String()
	}
	return statusPool{
		Name: name, Medium: u.Grant.Pool.Medium.String(), Capacity: mebibytes(u.CapacityBytes), Granted: mebibytes(u.GrantedBytes),
		Ready: mebibytes(u.ReadyAllocatedBytes), Retiring: mebibytes(u.RetiringBytes), Quarantined: mebibytes(u.QuarantinedBytes),
		Kept: mebibytes(u.KeptBytes), Objects: u.Objects, Leases: u.Leases,
	}
}

func mebibytes(n uint64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }
